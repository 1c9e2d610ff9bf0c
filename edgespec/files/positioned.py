"""Open files that several threads read at offsets, past the page cache where the system allows it.

This and `overlapped`, its counterpart for Windows, are all that knows how systems read. Whether reads past
the cache work is found by trying one.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from edgespec.files.state import FileState

# Direct reads begin and end at multiples of this in the file and in memory.
BLOCK = 4096


class PositionedFile(Protocol):
    """An open file."""

    direct: bool  # whether reads bypass the page cache. They must begin and end at blocks then.

    def read(self, memories: Sequence[memoryview], offset: int) -> int:
        """Fill `memories`, one after the other, from `offset` on; returns the bytes read, maybe fewer.

        Raises:
            OSError: the disk failed.
        """
        ...

    def state(self) -> FileState:
        """The file's state now; raises OSError if the system cannot say."""
        ...

    def drop(self, offset: int, n_bytes: int) -> None:
        """Let the system forget what it has cached of a part that was read."""
        ...

    def mapped(self) -> mmap.mmap:
        """Map the whole file, through the page cache; raises OSError or ValueError if that is impossible."""
        ...

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        ...


def open_positioned(path: Path, *, direct: bool | None = None) -> PositionedFile:
    """Open a file.

    Args:
        direct: whether reads must bypass the cache, or must not; None to have them do so where they can.

    Raises:
        OSError: the file cannot be opened.
        NotDirect: it cannot be read directly, and must be.
    """
    opened = _open_direct(path) if direct is not False else None
    if opened is not None:
        return opened
    if direct:
        raise NotDirect
    return _open_buffered(path)


class NotDirect(Exception):
    """A file cannot be read past the page cache."""


def drop_cached(descriptor: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Let the system forget what it has cached of an open file from an offset on, all of it if none is named.

    Pages that are not written yet stay.
    """
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)


if sys.platform == "win32":
    from edgespec.files.overlapped import OverlappedFile

    def can_read_at_offsets() -> bool:
        """False on systems where threads cannot share an open file."""
        return True

    def _open_direct(path: Path) -> PositionedFile | None:
        try:
            opened = OverlappedFile(path, direct=True)
        except OSError:
            return None
        return opened if _reads(opened) else None

    def _open_buffered(path: Path) -> PositionedFile:
        return OverlappedFile(path, direct=False)

else:
    import fcntl

    def can_read_at_offsets() -> bool:
        """False on systems where threads cannot share an open file."""
        return hasattr(os, "preadv")

    class _DescriptorFile:
        def __init__(self, descriptor: int, *, direct: bool) -> None:
            self.direct = direct
            self._descriptor = descriptor
            if not direct and sys.platform == "linux":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def read(self, memories: Sequence[memoryview], offset: int) -> int:
            return os.preadv(self._descriptor, memories, offset)

        def state(self) -> FileState:
            return FileState.of(self._descriptor)

        def drop(self, offset: int, n_bytes: int) -> None:
            if not self.direct:
                drop_cached(self._descriptor, offset, n_bytes)

        def mapped(self) -> mmap.mmap:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

        def close(self) -> None:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open_direct(path: Path) -> PositionedFile | None:
        flag = getattr(os, "O_DIRECT", 0)
        # On macOS, caching is turned off for an open descriptor.
        no_cache: int | None = getattr(fcntl, "F_NOCACHE", None)
        if not flag and no_cache is None:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | flag)
        except OSError:
            return None
        opened = _DescriptorFile(descriptor, direct=True)
        if flag:
            return opened if _reads(opened) else None
        try:
            fcntl.fcntl(descriptor, no_cache or 0, 1)
        except OSError:
            opened.close()
            return None
        return opened

    def _open_buffered(path: Path) -> PositionedFile:
        return _DescriptorFile(os.open(path, os.O_RDONLY), direct=False)


def _reads(file: PositionedFile) -> bool:
    """Try a read at an odd block, which fails if a larger alignment is required; closes the file then."""
    try:
        with mmap.mmap(-1, 2 * BLOCK) as memory, memoryview(memory) as view, view[BLOCK:] as block:
            file.read([block], BLOCK if file.state().n_bytes > 2 * BLOCK else 0)
    except OSError:
        with suppress(OSError):
            file.close()
        return False
    return True
