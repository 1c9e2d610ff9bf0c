"""The registry of pairs, and the choice of a drafter."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.drafter_choice import agreement_of, candidates, entry_of
from edgespec.models.hub.registry import MADE, REGISTERED, DrafterPair, PairRegistry
from tests.links import needs_links
from tests.unit.privileges import unprivileged


@pytest.fixture
def registry(tmp_path: Path) -> PairRegistry:
    return PairRegistry(tmp_path / "data" / "pairs.json")


def pair(path: Path, top1: float | None = None, kind: str = REGISTERED, target: str = "t") -> DrafterPair:
    path.touch()
    return DrafterPair(target, "target.gguf", str(path), kind, top1, top1, 100)


def header(path: Path) -> GGUFHeader:
    return GGUFHeader(path, 3, {}, (), 32, 0, 0, "t")


def test_pairs_are_remembered_best_first(registry: PairRegistry, tmp_path: Path) -> None:
    good, poor = pair(tmp_path / "good.gguf", 0.8), pair(tmp_path / "poor.gguf", 0.5)
    other = pair(tmp_path / "good.gguf", 0.9, target="u")
    for one in (poor, good, other):
        registry.add(one)
    assert registry.pairs("t") == [good, poor]
    assert registry.pairs() == [other, good, poor]
    better = replace(poor, top1=0.85)
    registry.add(better)
    assert registry.pairs("t") == [better, good]


def test_a_drafter_that_is_gone_is_not_offered(registry: PairRegistry, tmp_path: Path) -> None:
    registry.add(pair(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").unlink()
    assert registry.pairs() == []


def test_forgetting(registry: PairRegistry, tmp_path: Path) -> None:
    for name, target in (("a", "t"), ("b", "t"), ("b", "u")):
        registry.add(pair(tmp_path / f"{name}.gguf", target=target))
    registry.forget(target="t")
    assert [p.target for p in registry.pairs()] == ["u"]
    registry.forget(drafter=tmp_path / "b.gguf")
    assert registry.pairs() == []


@needs_links
def test_a_drafter_is_the_same_under_another_name(
    registry: PairRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = pair(tmp_path / "a.gguf", 0.5)
    registry.add(known)
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "a.gguf")
    again = replace(known, drafter=str(link), top1=0.6)
    registry.add(again)
    assert registry.pairs() == [again]
    monkeypatch.chdir(tmp_path)
    for name in ("a.gguf", "link.gguf", str(link)):
        assert registry.concerning(None, [Path(name)]) == [again]
    target = header(tmp_path / "target.gguf")
    assert agreement_of(target, Path("a.gguf"), registry) == 0.6
    assert agreement_of(target, tmp_path / "other.gguf", registry) is None
    # A model is no drafter for itself, whatever it is called.
    assert candidates(header(tmp_path / "a.gguf"), registry) == []
    registry.forget(drafter=Path("a.gguf"))
    assert registry.pairs() == []


def test_a_drafter_that_is_gone_is_told_of_and_can_be_forgotten(
    registry: PairRegistry, tmp_path: Path
) -> None:
    gone = pair(tmp_path / "a.gguf")
    registry.add(gone)
    registry.add(pair(tmp_path / "b.gguf"))
    gone.path.unlink()
    assert registry.missing("t") == registry.concerning(None, [gone.path]) == [gone]
    registry.forget_all([gone])
    assert registry.missing("t") == []
    assert len(registry.pairs()) == 1


def test_a_damaged_file_is_put_aside_not_lost(registry: PairRegistry, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for content, kept in (("half a fi", "pairs.damaged"), ("another half", "pairs.damaged2")):
        (tmp_path / "data" / "pairs.json").write_text(content)
        assert registry.pairs() == []
        registry.add(pair(tmp_path / "a.gguf"))
        assert (tmp_path / "data" / kept).read_text() == content
    assert (tmp_path / "data" / "pairs.damaged").read_text() == "half a fi"
    assert len(registry.pairs()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions there")
def test_pairs_that_cannot_be_read_are_not_replaced() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in the tests' own folder, which nobody else may enter
        Path(folder).chmod(0o777)
        registry, file = PairRegistry(Path(folder, "pairs.json")), Path(folder, "pairs.json")
        registry.add(pair(Path(folder, "a.gguf")))
        before, another = file.read_bytes(), pair(Path(folder, "b.gguf"))
        file.with_suffix(".lock").chmod(0o666)
        file.chmod(0)
        with unprivileged():
            assert registry.pairs() == []
            with pytest.raises(OutputError, match=r"pairs\.json cannot be written: Permission denied"):
                registry.add(another)
        file.chmod(0o600)
        assert file.read_bytes() == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"pairs\.json cannot be written: "):
        PairRegistry(tmp_path / "file" / "pairs.json").add(pair(tmp_path / "a.gguf"))


def test_registered_ones_come_before_made_ones(registry: PairRegistry, tmp_path: Path) -> None:
    registry.add(pair(tmp_path / "made.gguf", 0.9, MADE))
    registry.add(pair(tmp_path / "mine.gguf", 0.5))
    found = candidates(header(tmp_path / "target.gguf"), registry)
    assert [(c.path.name, c.reason) for c in found] == [
        ("mine.gguf", "registered for this target, agreement 0.50"),
        ("made.gguf", "made from this target, agreement 0.90"),
    ]
    # A model is no drafter for itself.
    assert candidates(header(tmp_path / "mine.gguf"), registry) == found[1:]


def test_a_sibling_of_the_catalog_is_offered_where_it_is_here(registry: PairRegistry, tmp_path: Path) -> None:
    target = header(tmp_path / "SmolLM2-1.7B-Instruct-Q4_K_M.gguf")
    found = candidates(target, registry)
    assert [(c.kind, c.path.name) for c in found] == [("catalog", "SmolLM2-135M-Instruct.Q4_1.gguf")]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/hub/models--Qwen--Qwen3-8B-GGUF/snapshots/0/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("/models/Llama-3.2-3B-Instruct-Q8_0.gguf", "llama3.2-3b"),
        ("/models/qwen3.8-27b-q4_k_m.gguf", "qwen3.8-27b"),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m"),
        ("/models/mine.gguf", None),
    ],
)
def test_files_that_the_catalog_knows(path: str, name: str | None) -> None:
    entry = entry_of(Path(path))
    assert (entry.name if entry else None) == name
