"""Widened models: larger, and word for word the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest

import edgespec
from benchmarks.widen import widen
from edgespec.generation.config import GenerationConfig
from edgespec.llama.quantize import make_drafter
from edgespec.models.gguf.header import read_header
from tests.tiny import write_tiny

PROMPT = "Why is the sky blue?"
CONFIG = GenerationConfig(max_tokens=24)


@pytest.fixture(scope="module")
def tiny(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of any quantization."""
    folder = tmp_path_factory.mktemp("tiny")
    plain = write_tiny(folder / "plain.gguf", "llama", smol_path)

    @cache
    def quantized(quantization: str) -> Path:
        return make_drafter(plain, folder / f"{quantization}.gguf", quantization=quantization)

    return quantized


@pytest.mark.parametrize("quantization", ["q4_1", "q4_0"])
def test_a_widened_model_says_the_same(
    quantization: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny(quantization)
    wanted = source.stat().st_size + 10_000_000
    path = widen(source, tmp_path / "wide.gguf", wanted)
    assert path.stat().st_size == pytest.approx(wanted, rel=0.1)
    header = read_header(path)
    assert header.metadata["general.name"].endswith(" (widened)")
    assert header.metadata["edgespec.widened_from"] == source.name
    texts, logits = [], []
    for model in (source, path):
        with edgespec.load(model, draft="none", exact=True, context=128) as engine:
            texts.append(engine.generate(PROMPT, CONFIG, raw=True).tokens)
            logits.append(engine.target.context.logits().copy())
    assert texts[0] == texts[1]
    np.testing.assert_array_equal(*logits)
    assert len(texts[0]) > 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["wide.gguf"]


def test_mixed_k_quantizations_are_widened(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny("q4_k_m")
    kinds = {tensor.type_id for tensor in read_header(source).tensors if "ffn_down" in tensor.name}
    assert len(kinds) > 1
    size = source.stat().st_size + 20_000_000
    path = widen(source, tmp_path / "wide.gguf", size)
    texts = []
    for model in (source, path):
        with edgespec.load(model, draft="none", exact=False, context=128) as engine:
            texts.append(engine.generate("The sky is", CONFIG, raw=True).tokens)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1


def test_what_cannot_be_widened_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be widened"):
        widen(tiny("iq4_nl"), tmp_path / "wide.gguf", 10**9)
    with pytest.raises(ValueError, match="bytes; 1000 must be larger"):
        widen(tiny("q4_0"), tmp_path / "wide.gguf", 1000)
    assert list(tmp_path.iterdir()) == []


def test_the_original_weights_are_all_there(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny("q4_0")
    path = widen(source, tmp_path / "wide.gguf", source.stat().st_size + 20_000_000)
    wide, narrow = gguf.GGUFReader(path), gguf.GGUFReader(source)
    for a, b in zip(wide.tensors, narrow.tensors, strict=True):
        rows, columns = b.data.shape if b.data.ndim == 2 else (b.data.shape[0], None)
        same = a.data[:rows, :columns] if columns is not None else a.data[:rows]
        assert (same == b.data).all()
        if a.name.endswith("ffn_down.weight"):
            assert not a.data[:, columns:].any()
