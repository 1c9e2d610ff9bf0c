"""The parts of `tests.card` that need neither a build nor a card."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.kernels import ggml
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from tests.card.build import Built
from tests.card.cases import ALL_ROWS, cases_of, sizes_within
from tests.card.device import FreeMemoryUnknown, is_software, take_all_but
from tests.card.passes import Placement, measure
from tests.card.runner import Runner
from tests.card.sources import ARCHIVE, NoSources, find_sources, pack
from tests.card.synthetic import write_model
from tests.card.table import difference, same_text, tables


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("card") / "tiny.gguf", "tiny")


def test_sources_are_unpacked_and_packed_without_what_is_not_built(tmp_path: Path) -> None:
    kept = ["vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/ggml/src/ggml.c", "llama_cpp/llama.py"]
    others = ["vendor/llama.cpp/tools/x.cpp", "vendor/llama.cpp/ggml/src/ggml-sycl/x.cpp", "README.md"]
    archive = tmp_path / "llama_cpp_python-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in kept + others:
            tar.addfile(tarfile.TarInfo(f"llama_cpp_python-1/{name}"), io.BytesIO())
    sources = find_sources(None, tmp_path)
    found = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "ggml/src/ggml.c", "python/llama_cpp/llama.py"}
    again = tmp_path / "again"
    pack(sources, again / ARCHIVE)
    assert (find_sources(None, again) / "ggml/src/ggml.c").is_file()
    with pytest.raises(NoSources, match="no file"):
        find_sources(tmp_path / "nothing.tar.gz", tmp_path / "other")


def test_a_made_model_answers_and_is_placed_by_its_bytes(tiny: Path) -> None:
    with edgespec.load(tiny, draft="none", context=64, threads=1) as engine:
        assert engine.generate("hello", GenerationConfig(max_tokens=3)).tokens
    whole = ModelFiles.of(read_header(tiny)).tensor_bytes
    assert sizes_within(tiny, 4 * whole).ffn_here == 0
    little, less = sizes_within(tiny, whole), sizes_within(tiny, whole, cells=4096)
    assert 0 < less.whole < little.whole < 6
    assert 0 < little.ffn_here < less.ffn_here <= 6
    labels = [case.label for case in cases_of(tiny, "CUDA0", whole, threads=1, seconds=1.0, rows=ALL_ROWS)]
    assert len(labels) == len(set(labels))


def test_passes_are_timed_and_their_logits_compared(tiny: Path) -> None:
    found = measure(Placement(str(tiny), rows=(1, 8), seconds=5.0, threads=1, offload=(0,)))
    assert set(found["passes"]["never"]) == {"1", "8"}
    deeper = measure(Placement(str(tiny), rows=(8,), seconds=5.0, threads=1, depth=9))
    assert difference(found["logits"], found["logits"]) == 0.0
    assert difference(found["logits"], deeper["logits"]) > 0.1
    from_disk = Placement(
        str(tiny), rows=(8,), seconds=5.0, threads=1, cpu_ffn=6, streamed=True, offload=(0,)
    )
    assert difference(found["logits"], measure(from_disk)["logits"]) < 1e-3
    entry = {"title": "tiny", "cases": [{"label": "here", **found}, {"label": "there", "error": "failed"}]}
    lines = list(
        tables({"models": {"tiny": entry}, "link": {"pinned": {"there": {"1": 2e9}}, "process_s": 1.0}})
    )
    assert any(line.startswith("| here | never | ") for line in lines)
    assert "| there | failed |" in lines
    assert "link, pinned memory: 2.0 GB/s there" in lines


def test_texts_part_at_near_ties_or_elsewhere() -> None:
    likeliest = [[[1, -0.1], [2, -3.0]], [[3, -0.7], [4, -0.8]]]
    own = {"tokens": [1, 3], "likeliest": likeliest}
    assert same_text(own, own) == "the same text"
    assert "then a near-tie" in same_text(own, {"tokens": [1, 4]})
    assert "NO near-tie" in same_text(own, {"tokens": [2, 3]})
    assert "NO near-tie" in same_text(own, {"tokens": [1, 9]})


def test_a_software_device_is_told_from_its_name() -> None:
    assert is_software({"description": "llvmpipe (LLVM 15.0.6, 256 bits)", "kind": "gpu"})
    assert is_software({"description": "some processor", "kind": "cpu"})
    assert not is_software({"description": "NVIDIA H200", "kind": "gpu"})
    assert not is_software({"description": "a worker that stands in for a card"})


def test_a_step_ends_within_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(Built(tmp_path, 0.0, "vulkan", ""), 0.1, tmp_path / "card.json", tmp_path)
    monkeypatch.setattr("tests.card.runner._LEAST_S", 1.0)
    (tmp_path / "asleep.py").write_text("import time\ntime.sleep(60)\n", "utf-8")
    assert runner.child("asleep") == {"error": "took more than 1 s"}
    assert runner.faults == 1


def test_memory_is_not_taken_from_a_device_that_does_not_tell_how_much_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.card.device.free_bytes", lambda device: 1 << 31)
    with pytest.raises(FreeMemoryUnknown):
        take_all_but(ggml.cpu_device(), 1 << 30)
