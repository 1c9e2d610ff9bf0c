"""States of texts on disk: what is found, what is kept, and what is not trusted."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import BackendError
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.states import BLOCK, StateFile, StateStore


class Cells:
    """A cache whose keys and values are the tokens themselves."""

    def __init__(self, *, saves_parts: bool = True) -> None:
        self.saves_parts = saves_parts
        self.text: list[int] = []
        self.refuses = False

    @property
    def length(self) -> int:
        return len(self.text)

    def rewind(self, length: int) -> None:
        self.text = self.text[:length] if self.saves_parts or length >= len(self.text) else []

    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]:
        part = self.text[start:end] if self.saves_parts else self.text
        return (ctypes.c_uint8 * len(part))(*part)

    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None:
        if self.refuses:
            raise BackendError("no")
        assert len(state) == n_tokens
        self.text = [*(self.text if self.saves_parts else []), *state]


def cells(text: list[int], **more: Any) -> Any:
    cache = Cells(**more)
    cache.text = list(text)
    return cache


TEXT = [i % 251 for i in range(3 * BLOCK + 40)]


@pytest.mark.parametrize("parts", [True, False])
def test_a_kept_text_is_put_back(tmp_path: Path, parts: bool) -> None:
    StateStore(CheckedFiles(tmp_path), "x").save(cells(TEXT, saves_parts=parts), TEXT, tail=True)
    cache = cells([], saves_parts=parts)
    assert StateStore(CheckedFiles(tmp_path), "x").restore(cache, [*TEXT, 1, 2]) == len(TEXT)
    assert cache.text == TEXT
    other = cells([], saves_parts=parts)
    assert StateStore(CheckedFiles(tmp_path), "another model").restore(other, TEXT) == 0


def test_texts_that_begin_alike_share_their_blocks(tmp_path: Path) -> None:
    store = StateStore(CheckedFiles(tmp_path), "x")
    store.save(cells(TEXT), TEXT, tail=False)
    other = [*TEXT[: 2 * BLOCK + 5], *([7] * BLOCK)]
    store.save(cells(other), other, tail=False)
    assert len(list(tmp_path.iterdir())) == 4
    cache = cells(TEXT[:10])
    assert store.restore(cache, other) == 3 * BLOCK
    assert cache.text == other[: 3 * BLOCK]
    store.prune(other, parts=True)
    assert len(list(tmp_path.iterdir())) == 3


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_cache_is_never_wrong_and_never_shorter(
    tmp_path_factory: pytest.TempPathFactory, kept: int, held: int, asked: int, tail: bool
) -> None:
    text = [(i * 7) % 250 for i in range(400)]
    store = StateStore(CheckedFiles(tmp_path_factory.mktemp("states")), "x")
    store.save(cells(text[:kept]), text[:kept], tail=tail)
    cache = cells(text[: min(held, asked)])
    length = store.restore(cache, text[:asked])
    assert cache.text == text[:length]
    assert length >= min(held, asked, (kept // BLOCK) * BLOCK)
    assert length >= min(held, asked)


@pytest.mark.parametrize("damage", [b"", b"EDGEKV01", b"EDGEKV01" + bytes(4) + b"abc"])
def test_damaged_files_count_as_missing_and_are_removed(tmp_path: Path, damage: bytes) -> None:
    StateStore(CheckedFiles(tmp_path), "x").save(cells(TEXT), TEXT, tail=True)
    second = next(p for p in tmp_path.iterdir() if p.read_bytes()[12:16] == bytes(TEXT[BLOCK : BLOCK + 4]))
    second.write_bytes(damage)
    cache = cells([])
    assert StateStore(CheckedFiles(tmp_path), "x").restore(cache, TEXT) == BLOCK
    assert cache.text == TEXT[:BLOCK]
    assert not second.exists()
    refusing = cells([])
    refusing.refuses = True
    assert StateStore(CheckedFiles(tmp_path), "x").restore(refusing, TEXT) == 0


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    store = StateStore(CheckedFiles(tmp_path, limit=3 * (BLOCK + 12)), "x")
    texts = [[i] * BLOCK for i in range(4)]
    for age, text in enumerate(texts[:3]):
        store.save(cells(text), text, tail=False)
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 + age))
    assert store.restore(cells([]), texts[0]) == BLOCK  # used, so it is young again
    store.save(cells(texts[3]), texts[3], tail=False)
    assert [store.restore(cells([]), text) for text in texts] == [BLOCK, 0, BLOCK, BLOCK]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = StateStore(CheckedFiles(tmp_path / "file" / "x"), "x")
    store.save(cells(TEXT), TEXT, tail=True)
    assert store.failure.startswith(f"{tmp_path / 'file' / 'x'} cannot be written: ")
    assert store.restore(cells([]), TEXT) == 0


def test_what_several_texts_begin_with_is_kept_the_longest(tmp_path: Path) -> None:
    store = StateStore(CheckedFiles(tmp_path, limit=4 * (BLOCK + 12)), "x")
    shared = [1] * (2 * BLOCK)
    for end in range(2, 7):
        text = [*shared, *([end] * BLOCK)]
        store.save(cells(text), text, tail=False)
        assert store.restore(cells([]), text) == 3 * BLOCK
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * (BLOCK + 12)


def test_a_text_may_be_written_block_by_block(tmp_path: Path) -> None:
    store = StateStore(CheckedFiles(tmp_path), "x")
    steps = store.saving(cells(TEXT), TEXT, tail=True)
    next(steps)
    assert len(list(tmp_path.iterdir())) == 1
    steps.close()
    assert StateStore(CheckedFiles(tmp_path), "x").restore(cells([]), TEXT) == BLOCK


def test_a_file_larger_than_the_limit_displaces_nothing(tmp_path: Path) -> None:
    files = CheckedFiles(tmp_path, limit=100)
    files.write("small", b"x" * 40)
    files.write("large", b"x" * 200)
    assert files.names() == {"small"}
    assert files.failure == ""


def test_a_moment_of_a_full_disk_is_told_and_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = CheckedFiles(tmp_path, limit=1 << 20, retry_s=0)
    engine: Any = SimpleNamespace(prompt_files=files)
    Terminal().watch_prompt_cache(engine)
    store = StateStore(files, "x")
    with largest_file(BLOCK // 2):
        for _ in range(3):
            store.save(cells(TEXT), TEXT, tail=True)
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {52}, "the last, short block"
    assert store.failure
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"{store.failure}. Prompts are not cached until that is possible again."
    for _ in range(2):
        store.save(cells(TEXT), TEXT, tail=True)
    assert store.failure == ""
    assert " ".join(capsys.readouterr().err.split()) == "Prompts are cached on disk again."
    assert store.restore(cells([]), TEXT) == len(TEXT)


def test_after_a_failure_nothing_is_tried_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    told: list[str] = []
    files = CheckedFiles(folder, retry_s=1e9)
    files.on_change = told.append
    files.write("one", b"x")
    folder.unlink()
    files.write("one", b"x")
    assert not folder.exists()
    assert told == [files.failure]


def test_a_state_in_a_file_comes_back_and_leaves_nothing_on_disk(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "new", cells(TEXT), TEXT)
    if sys.platform != "win32":  # where the system removes it at the end
        assert not list((tmp_path / "new").iterdir()), "no end of the program leaves it there"
    for known in ([], TEXT[:BLOCK], TEXT[: BLOCK + 7]):
        cache = cells(known)
        assert state.restore(cache, [*TEXT, 1]) == len(TEXT)
        assert cache.text == TEXT
    assert state.restore(cells([]), TEXT[1:]) == 0
    state.close()
    assert state.closed
    assert not list((tmp_path / "new").iterdir())
    assert state.restore(cells([]), TEXT) == 0


def test_a_state_that_the_disk_refuses_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert StateFile(tmp_path / "file", cells(TEXT), TEXT).restore(cells([]), TEXT) == 0
    with largest_file(2 * BLOCK + 5):
        state = StateFile(tmp_path, cells(TEXT), TEXT)
    assert state.restore(cells([]), TEXT) == 2 * BLOCK
    cache = cells([])
    cache.refuses = True
    assert state.restore(cache, TEXT) == 0
    assert state._file is not None
    state._file.close()  # no read succeeds any more
    state._file = os.fdopen(os.open(tmp_path / "file", os.O_WRONLY), "wb", buffering=0)
    assert state.restore(cells([]), TEXT) == 0
    state.close()


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """A disk that refuses what a file has beyond so many bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
