"""Compiling EdgeSpec's own kernels: which files, with what, and what happens if that fails."""

from __future__ import annotations

import ctypes
import os
import sys
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
    (folder / "sources.txt").write_text(
        "# file, machine, set, flags\none.cpp any any\ntwo.cpp any any -DTWO=2\n"
    )
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (folder / "two.cpp").write_text('extern "C" int two() { return TWO; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "_failure", None)
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
    (sources / "one.cpp").write_text('extern "C" int one() { return 11; }\n')
    build.sources_digest.cache_clear()
    other = build.build()
    assert made.exists(), "another version of the program that uses this folder needs it"
    os.utime(made, (0, 0))
    build.build(again=True)
    assert not made.exists(), "nobody has used that version for months"
    assert other.exists()


def test_a_compiler_without_an_instruction_set_leaves_its_file_out(sources: Path) -> None:
    (sources / "sources.txt").write_text(
        "one.cpp any any\ntwo.cpp any any -DTWO=2 -mno-such-instruction-set\n"
    )
    made = functions(build.build())
    assert made.one() == 1
    assert not hasattr(made, "two")


def test_a_library_for_others_lacks_no_instruction_set(sources: Path, tmp_path: Path) -> None:
    first, second = build.build_into(tmp_path / "first"), build.build_into(tmp_path / "second")
    assert (functions(first).one(), functions(first).two()) == (1, 2)
    assert first.read_bytes() == second.read_bytes()
    assert build.library_path() is None, "it is not for this installation"
    (sources / "sources.txt").write_text(
        "one.cpp any any\ntwo.cpp any any -DTWO=2 -mno-such-instruction-set\n"
    )
    with pytest.raises(BuildFailed, match=r"fails at two\.cpp"):
        build.build_into(tmp_path / "third")


def test_files_of_other_machines_are_not_compiled(sources: Path) -> None:
    (sources / "sources.txt").write_text("one.cpp any any\ntwo.cpp some-other-machine any\n")
    assert not hasattr(functions(build.build()), "two")


@pytest.fixture
def sets(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library with three instruction sets, of which SETS names those that the processor has."""
    (sources / "sources.txt").write_text(
        "one.cpp any any\nprocessor.cpp any any\n"
        + "".join(f"{name}.cpp {build._machine()} {name}\n" for name in ("first", "second", "third"))
    )
    for name in ("first", "second", "third"):
        (sources / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
    (sources / "processor.cpp").write_text(
        "#include <cstdlib>\n#include <cstring>\n"
        'extern "C" int edgespec_isa_id(const char * name) { return name[0]; }\n'
        'extern "C" int edgespec_processor_has(int isa) { return strchr(getenv("SETS"), isa) != nullptr; }\n'
    )
    monkeypatch.setenv("SETS", "f")
    return sources


def compiled_in(path: Path) -> set[str]:
    return {name for name in ("first", "second", "third") if hasattr(functions(path), name)}


def test_instruction_sets_that_the_processor_lacks_are_left_out(sets: Path, tmp_path: Path) -> None:
    made = build.build()
    assert compiled_in(made) == build.compiled_sets(made) == {"first"}
    assert functions(made).one() == 1
    assert not build.needs_build()
    assert build.build() == made
    complete = build.build_into(tmp_path / "wheel")
    assert compiled_in(complete) == build.compiled_sets(complete) == {"first", "second", "third"}


def test_a_library_for_all_processors_serves_each(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, complete = build.build(), build.build_into(sets / "compiled")
    assert build.library_path() == complete, "and not the one for this processor"
    monkeypatch.setenv("SETS", "t")
    assert not build.needs_build()
    assert build.build() == complete
    assert made.exists()


def test_another_processor_adds_its_own_to_a_shared_folder(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build()
    monkeypatch.setenv("SETS", "t")
    assert build.needs_build()
    build.build_once()
    made = build.library_path()
    assert made is not None
    assert compiled_in(made) == {"first", "third"}
    for of_processor in ("f", "t"):
        monkeypatch.setenv("SETS", of_processor)
        assert not build.needs_build()


def test_a_processor_without_any_of_the_sets_gets_the_rest(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SETS", "")
    made = build.build()
    assert compiled_in(made) == set()
    assert functions(made).one() == 1
    assert build.library_path() == made
    assert not build.needs_build()


def test_without_a_compiler_another_processors_library_serves(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.build()
    monkeypatch.setenv("SETS", "ft")
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.build_once()
    assert build.library_path() == made
    assert build.known_failure() is None, "there is a library"


def test_a_set_that_the_compiler_does_not_know_is_not_tried_again(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = sets / "sources.txt"
    unknown = f"first.cpp {build._machine()} first -mno-such-instruction-set"
    manifest.write_text(manifest.read_text().replace(f"first.cpp {build._machine()} first", unknown))
    assert compiled_in(build.build()) == set()
    assert not build.needs_build()


def test_the_real_sources_name_sets_that_their_gate_knows() -> None:
    made = functions(build.build())
    sets = build.instruction_sets()
    assert all(made.edgespec_isa_id(name.encode()) >= 0 for name in sets)
    here = {name for name in sets if made.edgespec_processor_has(made.edgespec_isa_id(name.encode()))}
    assert here <= build.compiled_sets(build.build())


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
    with pytest.raises(BuildFailed, match="CXX names no-such-compiler"):
        build.build()


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")
def test_a_build_that_failed_is_tried_once_in_a_process(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "one.cpp: error: no such thing" >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build.build_once()
    monkeypatch.delenv("CXX")
    build.build_once()
    failure = build.known_failure()
    assert failure is not None
    assert "no such thing" in str(failure)
    assert build.COMMAND in failure.remedy
    monkeypatch.setattr(build, "_failure", None)  # the next process
    build.build_once()
    assert build.library_path() is not None
    assert build.known_failure() is None


def test_threads_that_end_have_no_objects_to_destroy() -> None:
    """MinGW frees such objects before it calls their destructors, and the program aborts."""
    library = build.library_path()
    if library is None:
        pytest.skip("the kernels are not compiled")
    assert b"__cxa_thread_atexit" not in library.read_bytes()
