"""Streaming goes by rule: other architectures, quantizations and split files give the same text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

import edgespec
from edgespec.errors import BackendError, ModelFileError
from edgespec.generation.config import GenerationConfig
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import plain_store
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory import stream_layout
from tests.fuzz.architectures import make
from tests.integration.test_streaming import load_streamed
from tests.tiers import slow_except
from tests.tiny import ARCHITECTURES, MIXTURES, N_LAYER, write_tiny
from tests.tiny_rwkv import write_rwkv

pytestmark = pytest.mark.kernels

CONFIG = GenerationConfig(max_tokens=24)
PROMPT = "the one and the other"


def check(path: Path, *, parts: bool = False) -> None:
    """Compare streamed text with that from memory.

    Args:
        parts: the matrices of layers are streamed one by one.
    """
    # Whether this processor has a faster layout for any of these weights is ggml's to say.
    packed = gains_from_packing(ModelFiles.of(read_header(path)).layers())
    with edgespec.load(path, draft="none", context=64) as engine:
        expected = engine.generate(PROMPT, CONFIG, raw=True).tokens
        logits = engine.target.context.logits().copy()
    with load_streamed(path, draft="none", context=64, exact=False) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
        weights = engine.target.model.weights
        assert isinstance(weights, StreamedWeights)
        assert weights.packed is packed
        assert (len(weights.store.layers) > N_LAYER) is parts
        assert answer.memory.streamed_bytes_per_pass > path.stat().st_size / N_LAYER / 8
        assert answer.tokens == expected
        assert (engine.target.context.logits() == logits).all()
    assert logits.std() > 0


@pytest.fixture(scope="module")
def llama(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in F16."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "plain.gguf", "llama", smol_path)


@pytest.mark.parametrize("architecture", slow_except(["qwen3moe"], sorted(ARCHITECTURES)))
def test_architectures(
    architecture: str, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_tiny(tmp_path / f"{architecture}.gguf", architecture, smol_path)
    path = make_drafter(plain, tmp_path / "quantized.gguf", quantization="q4_k_m")
    check(path)
    monkeypatch.setattr(stream_layout, "PART_BYTES", 1)
    check(path, parts=architecture not in MIXTURES)  # whose experts are read one by one


@pytest.mark.parametrize(
    "quantization",
    slow_except(["iq3_s"], ["f16", "bf16", "q8_0", "q5_1", "q6_k", "q2_k", "iq4_nl", "iq3_s", "q4_0"]),
)
def test_quantizations(quantization: str, llama: Path, tmp_path: Path) -> None:
    path = llama
    if quantization != "f16":
        path = make_drafter(llama, tmp_path / "quantized.gguf", quantization=quantization)
    with edgespec.load(path, draft="none", context=64) as engine:
        expected = engine.generate(PROMPT, CONFIG, raw=True).tokens
    with load_streamed(path, draft="none", context=64, exact=False) as engine:
        assert engine.generate(PROMPT, CONFIG, raw=True).tokens == expected


def test_split_files(smol_path: Path, tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "parts.gguf", "llama", smol_path, split=20)
    assert first.name == "parts-00001-of-00003.gguf"
    check(first)


@pytest.mark.parametrize("architecture", slow_except(["gemma4"], ["gemma3n", "gemma4"]))
def test_tables_stay_in_the_file(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    """Per-layer embeddings are neither streamed nor in memory: their rows are read from the mapped file."""
    path = made(architecture, smol_path, tmp_path / f"{architecture}.gguf")
    files = ModelFiles.of(read_header(path))
    (table,) = files.tables
    with edgespec.load(path, draft="none", context=64) as engine:
        expected = engine.generate(PROMPT, CONFIG, raw=True).tokens
        logits = engine.target.context.logits().copy()
        assert not mapped(path)
    assert logits.std() > 0
    with load_streamed(path, draft="none", context=64, exact=False) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
        weights = engine.target.model.weights
        assert isinstance(weights, StreamedWeights)
        assert mapped(path)
        assert answer.tokens == expected
        assert (engine.target.context.logits() == logits).all()
        assert table.name not in {t for layer in weights.store.layers.values() for t in layer.places}
        os.utime(path)
        with pytest.raises(ModelFileError, match="was changed"):
            engine.generate(PROMPT, CONFIG, raw=True)
    assert not mapped(path)


def test_a_model_that_does_not_write_token_after_token(smol_path: Path, tmp_path: Path) -> None:
    path = made("dream", smol_path, tmp_path / "dream.gguf")
    with pytest.raises(BackendError, match="an encoder or a diffusion model"):
        edgespec.load(path, draft="none", context=64)


def test_matrices_that_are_read_in_another_shape(smol_path: Path, tmp_path: Path) -> None:
    """A graph has their views before what the layer before computes."""
    path = write_rwkv(tmp_path / "rwkv.gguf", smol_path)
    files = ModelFiles.of(read_header(path))
    layers = files.layers()
    weights = StreamedWeights(files, plain_store(files, layers), [layer.index for layer in layers], n_slots=2)
    logits = []
    for model in (Model(path, repack=False), Model(path, repack=False, weights=weights)):
        with model:
            sizes = {"n_cells": 64, "n_rows": 4, "n_outputs": 4, "n_sequences": 1, "n_threads": 1}
            context = Context(model, **sizes)
            for rows in (4, 1, 4):
                context.clear()
                context.decode(TokenBatch.run(range(rows), 0, n_sequences=1, logits="all"))
                logits.append(np.array(context.logits()))
            read = model.weights.read_bytes
    assert read > sum(layer.n_bytes for layer in layers)
    for streamed, expected in zip(logits[3:], logits[:3], strict=True):
        np.testing.assert_array_equal(streamed, expected)


def test_stacks_that_are_multiplied_whole(smol_path: Path, tmp_path: Path) -> None:
    """No kernel layout is given to a stack of which it would multiply the first matrix alone."""
    path = made("gemma3n", smol_path, tmp_path / "gemma3n.gguf")
    found = []
    for repack in (False, True):
        with Model(path, repack=repack) as model:
            context = Context(model, n_cells=64, n_rows=8, n_outputs=8, n_sequences=1, n_threads=1)
            context.decode(TokenBatch.run(range(8), 0, n_sequences=1, logits="all"))
            found.append(context.logits().copy())
            context.close()
    plain, rearranged = found
    assert plain.std() > 0
    assert np.abs(rearranged - plain).max() < 0.05 * plain.std()


def made(architecture: str, vocabulary_of: Path, path: Path) -> Path:
    """A tiny model that llama.cpp was asked for, with weights by which numbers stay finite."""
    path.write_bytes(make(architecture, vocabulary_of).to_bytes())
    rng = np.random.default_rng(1)
    data = np.memmap(path, dtype=np.uint8, mode="r+")
    for tensor in read_header(path).tensors:
        kind = {0: np.float32, 1: np.float16}[tensor.type_id]
        count = tensor.n_bytes // np.dtype(kind).itemsize
        values = rng.normal(0.0 if len(tensor.shape) > 1 else 1.0, 0.1, count).astype(kind)
        data[tensor.offset : tensor.offset + tensor.n_bytes] = values.view(np.uint8)
    data.flush()
    return path


def mapped(path: Path) -> bool:
    """Check whether a file is mapped into this process."""
    return str(path) in {area.path for area in psutil.Process().memory_maps()}
