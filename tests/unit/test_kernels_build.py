"""Compiling EdgeSpec's own kernels: which files, with what, and what happens if that fails."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.kernels.native import build
from edgespec.kernels.native.build import BuildFailed


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small library of two files."""
    try:
        build._compiler()
    except BuildFailed as error:
        pytest.skip(str(error))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "sources.txt").write_text("# file, machine, flags\none.cpp any\ntwo.cpp any -DTWO=2\n")
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (folder / "two.cpp").write_text('extern "C" int two() { return TWO; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.sources_digest.cache_clear()
    yield folder
    build.sources_digest.cache_clear()


def functions(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def test_a_library_is_compiled_once_for_its_sources(sources: Path) -> None:
    assert build.library_path() is None
    first = build.build()
    assert first.parent.parent == sources
    assert (functions(first).one(), functions(first).two()) == (1, 2)
    written = first.stat().st_mtime_ns
    assert build.build() == build.library_path() == first
    assert first.stat().st_mtime_ns == written
    (sources / "one.cpp").write_text('extern "C" int one() { return 11; }\n')
    build.sources_digest.cache_clear()
    assert build.library_path() is None, "of other sources"
    second = build.build()
    assert functions(second).one() == 11
    assert not first.exists(), "nobody needs it any more"


def test_a_folder_that_cannot_be_written_to_is_passed_over(sources: Path) -> None:
    (sources / "compiled").write_text("a file, where a folder would have to be made")
    made = build.build()
    assert sources not in made.parents
    assert build.library_path() == made
    assert functions(made).one() == 1


def test_a_compiler_without_an_instruction_set_leaves_its_file_out(sources: Path) -> None:
    (sources / "sources.txt").write_text("one.cpp any\ntwo.cpp any -DTWO=2 -mno-such-instruction-set\n")
    made = functions(build.build())
    assert made.one() == 1
    assert not hasattr(made, "two")


def test_files_of_other_machines_are_not_compiled(sources: Path) -> None:
    (sources / "sources.txt").write_text("one.cpp any\ntwo.cpp some-other-machine\n")
    assert not hasattr(functions(build.build()), "two")


def test_an_error_of_the_compiler_is_reported(
    sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "one.cpp").write_text("no C++\n")
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert "EdgeSpec's own kernels cannot be compiled" in said
    assert "one.cpp" in said


def test_a_compiler_that_is_not_there_is_reported(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="no-such-compiler cannot be run"):
        build.build()
