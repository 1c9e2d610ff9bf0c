"""Streaming goes by rule: other architectures, quantizations and split files give the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.quantize import make_drafter
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.weights import StreamedWeights
from tests.integration.test_streaming import load_streamed
from tests.tiny import ARCHITECTURES, N_LAYER, write_tiny

pytestmark = pytest.mark.kernels

CONFIG = GenerationConfig(max_tokens=24)
PROMPT = "the one and the other"


def check(path: Path) -> None:
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
        assert answer.memory.streamed_bytes_per_pass > path.stat().st_size / N_LAYER / 4
        assert answer.tokens == expected
        assert (engine.target.context.logits() == logits).all()
    assert logits.std() > 0


@pytest.fixture(scope="module")
def llama(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in F16."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "plain.gguf", "llama", smol_path)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_architectures(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / f"{architecture}.gguf", architecture, smol_path)
    check(make_drafter(plain, tmp_path / "quantized.gguf", quantization="q4_k_m"))


@pytest.mark.parametrize(
    "quantization", ["f16", "bf16", "q8_0", "q5_1", "q6_k", "q2_k", "iq4_nl", "iq3_s", "q4_0"]
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
