"""Reading past the page cache: the right bytes, and every fault a clear error."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK, PositionedFile, open_positioned

SIZE = 5 * BLOCK + 123
CONTENT = bytes(os.urandom(SIZE))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def memory() -> Iterator[memoryview]:
    area = mmap.mmap(-1, 16 * BLOCK)
    with memoryview(area) as view:
        yield view
    area.close()


@pytest.fixture
def kind(file: Path) -> type[PositionedFile]:
    """The class of open files on this system."""
    opened = open_positioned(file)
    opened.close()
    return type(opened)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(("offset", "n_bytes"), [(0, BLOCK), (BLOCK, 3 * BLOCK), (4 * BLOCK, 4 * BLOCK)])
def test_reads_give_the_files_bytes(
    file: Path, memory: memoryview, direct: bool | None, offset: int, n_bytes: int
) -> None:
    reader = FileReader(file, direct=direct)
    with memory[:n_bytes] as part:
        read = reader.read_into([part], offset)
        assert read == min(n_bytes, SIZE - offset)
        assert part[:read] == CONTENT[offset : offset + read]
    reader.close()


@pytest.mark.skipif(sys.platform == "win32", reason="it has no O_DIRECT")
def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    file: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    reader = FileReader(file)
    assert not reader.direct
    with memory[: 8 * BLOCK] as part:
        assert reader.read_into([part], 0) == SIZE
        assert part[:SIZE] == CONTENT
    reader.close()


def test_short_reads_are_continued_at_a_block(
    file: Path, kind: type[PositionedFile], memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FileReader(file)
    offsets = []
    read = kind.read

    def short(opened: PositionedFile, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        whole = read(opened, buffers, offset)
        return min(whole, BLOCK + 100) if offset < 3 * BLOCK else whole

    monkeypatch.setattr(kind, "read", short)
    with memory[: 8 * BLOCK] as part:
        assert reader.read_into([part], 0) == SIZE
        assert part[:SIZE] == CONTENT
    assert len(offsets) > 2
    assert all(offset % BLOCK == 0 for offset in offsets)
    reader.close()


def test_a_file_that_shrinks_is_an_error(file: Path, memory: memoryview) -> None:
    reader = FileReader(file)
    os.truncate(file, 2 * BLOCK)
    with memory[: 8 * BLOCK] as part, pytest.raises(StreamError) as caught:
        reader.read_into([part], 0)
    assert caught.value.what == f"'{file}' was changed while the model was in use."
    assert "load the model again" in caught.value.hint
    reader.close()


def test_a_file_that_is_written_to_is_an_error(file: Path, memory: memoryview) -> None:
    reader = FileReader(file)
    with file.open("r+b") as handle:
        handle.write(b"other")
    os.utime(file, ns=(1, 1))
    with memory[:BLOCK] as part, pytest.raises(StreamError, match="was changed while the model was in use"):
        reader.read_into([part], 0)
    reader.close()


@pytest.mark.skipif(sys.platform == "win32", reason="it refuses to replace an open file")
def test_a_file_that_is_replaced_is_still_read_as_it_was(file: Path, memory: memoryview) -> None:
    reader = FileReader(file)
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.replace(file)
    with memory[:BLOCK] as part:
        reader.read_into([part], 0)
        assert part == CONTENT[:BLOCK]
    reader.close()


def test_a_disk_that_fails_is_named(
    file: Path, kind: type[PositionedFile], memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FileReader(file)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(kind, "read", fail)
    with memory[:BLOCK] as part, pytest.raises(StreamError) as caught:
        reader.read_into([part], 0)
    assert str(caught.value) == (
        f"Reading '{file}' failed: Input/output error. Check the disk, and try again."
    )
    reader.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(StreamError) as caught:
        FileReader(missing)
    assert re.fullmatch(rf"Reading '{re.escape(str(missing))}' failed: [\w ]+\.", caught.value.what)


def test_reads_far_into_a_file_find_their_place(tmp_path: Path, memory: memoryview) -> None:
    """Offsets beyond 32 bits; the file has holes."""
    path = tmp_path / "sparse.bin"
    far = (5 << 30) + BLOCK
    with path.open("wb") as handle:
        handle.seek(far)
        handle.write(CONTENT[:BLOCK])
    reader = FileReader(path)
    with memory[:BLOCK] as first, memory[BLOCK : 2 * BLOCK] as second:
        assert reader.read_into([first, second], far - BLOCK) == 2 * BLOCK
        assert first == bytes(BLOCK)
        assert second == CONTENT[:BLOCK]
    reader.close()
