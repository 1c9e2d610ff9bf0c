"""Widened models: larger, and word for word the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

import edgespec
from edgespec.errors import ModelFileError, OutputError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.widen import widen
from edgespec.models.llama.quantize import make_drafter

PROMPT = "Why is the sky blue?"
CONFIG = GenerationConfig(max_tokens=24)


@pytest.mark.parametrize("fixture", ["smol_path", "q4_drafter_path"])
def test_a_widened_model_says_the_same(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(fixture)
    wanted = source.stat().st_size + 50_000_000
    path = widen(source, tmp_path / "wide.gguf", wanted)
    assert path.stat().st_size == pytest.approx(wanted, rel=0.1)
    header = read_header(path)
    assert header.metadata["general.name"].endswith(" (widened)")
    assert header.metadata["edgespec.widened_from"] == source.name
    texts = []
    for model in (source, path):
        with edgespec.load(model, draft="none", exact=True, context=128) as engine:
            texts.append(engine.generate(PROMPT, CONFIG).tokens)
    assert texts[0] == texts[1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["wide.gguf"]


def test_mixed_k_quantizations_are_widened(gemma_path: Path, tmp_path: Path) -> None:
    told: list[float] = []
    size = gemma_path.stat().st_size + 60_000_000
    path = widen(gemma_path, tmp_path / "wide.gguf", size, on_progress=lambda _, done: told.append(done))
    assert told == sorted(told) != []
    texts = []
    for model in (gemma_path, path):
        with edgespec.load(model, draft="none", exact=False, context=128) as engine:
            texts.append(engine.generate("The sky is", CONFIG, raw=True).tokens)
    assert texts[0] == texts[1]


def test_what_cannot_be_widened_is_named(smol_path: Path, tmp_path: Path) -> None:
    small = make_drafter(smol_path, tmp_path / "iq4.gguf", quantization="iq4_nl")
    with pytest.raises(ModelFileError, match="is IQ4_NL, which cannot be widened") as caught:
        widen(small, tmp_path / "wide.gguf", 10**9)
    assert "Q4_0, Q4_1" in caught.value.hint
    small.unlink()
    with pytest.raises(OutputError, match=r"would take 1,152,921,504,606,846,976 bytes, and"):
        widen(smol_path, tmp_path / "wide.gguf", 1 << 60)
    with pytest.raises(UsageError, match="bytes already, and 1000 were asked for"):
        widen(smol_path, tmp_path / "wide.gguf", 1000)
    assert list(tmp_path.iterdir()) == []


def test_the_original_weights_are_all_there(q4_drafter_path: Path, tmp_path: Path) -> None:
    path = widen(q4_drafter_path, tmp_path / "wide.gguf", q4_drafter_path.stat().st_size + 20_000_000)
    wide, narrow = gguf.GGUFReader(path), gguf.GGUFReader(q4_drafter_path)
    for a, b in zip(wide.tensors, narrow.tensors, strict=True):
        rows, columns = b.data.shape if b.data.ndim == 2 else (b.data.shape[0], None)
        same = a.data[:rows, :columns] if columns is not None else a.data[:rows]
        assert (same == b.data).all()
        if a.name.endswith("ffn_down.weight"):
            assert not a.data[:, columns:].any()
