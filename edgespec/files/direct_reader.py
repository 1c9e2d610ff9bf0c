"""Reading weights with direct I/O, bypassing the page cache.

A model larger than memory gains nothing from the page cache, which its own reads would flush, and buffered
reads cost a copy. So files are read directly into the memory where the weights are used, if the system and
the file system allow it. Otherwise reads are buffered, and the cache is told to drop the pages afterwards.
Whether direct reads work is found by trying one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import StreamError
from edgespec.files.state import FileState

if TYPE_CHECKING:
    import mmap

# Direct reads begin and end at multiples of this in the file and in memory.
BLOCK = 4096


class FileReader:
    """One open file, read by several threads.

    Attributes:
        path: the file.
        direct: whether reads bypass the page cache.
        n_bytes: its size.
        opened: its state when it was opened.

    Raises:
        StreamError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool | None = None, may_be_rewritten: bool = False) -> None:
        self.path = path
        self._watch_time = not may_be_rewritten
        self._descriptor = -1
        try:
            descriptor = _open_direct(path) if direct is not False else None
            if descriptor is None and direct:
                raise StreamError(f"'{path}' cannot be read directly.", "Its file system does not allow it.")
            self.direct = descriptor is not None
            self._descriptor = os.open(path, os.O_RDONLY) if descriptor is None else descriptor
            self.opened = FileState.of_status(os.fstat(self._descriptor))
        except OSError as error:
            raise self._failed(error) from error
        self.n_bytes = self.opened.n_bytes
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, memories: Sequence[memoryview], offset: int) -> int:
        """Fill `memories`, one after the other, from `offset` on, or as far as the file goes.

        Args:
            memories: their sizes and `offset` are multiples of BLOCK.

        Returns:
            Bytes read.

        Raises:
            StreamError: the disk failed, or the file has changed since it was opened.
        """
        wanted = min(sum(map(len, memories)), self.n_bytes - offset)
        done = 0
        try:
            while done < wanted:
                # After a short read, the next direct read must begin at a block again.
                start = done - done % BLOCK
                with _views_from(memories, start) as rest:
                    n = os.preadv(self._descriptor, rest, offset + start)
                if start + n <= done:
                    break
                done = start + n
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, offset, wanted, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error) from error
        self.check_unchanged()
        if done < wanted:
            raise self.changed()
        return wanted

    def check_unchanged(self) -> FileState:
        """Raise if the file was truncated or written to.

        A file that was replaced, deleted, renamed or given another mode can still be read as it was. A file
        that was written to and then had its modification time restored looks the same; so the reader must
        compare the content if the state has changed, see StoreReader.

        Returns:
            The file's state now.

        Raises:
            StreamError: the file has changed since it was opened.
        """
        try:
            now = FileState.of_status(os.fstat(self._descriptor))
        except OSError as error:
            raise self._failed(error) from error
        same = now.n_bytes == self.opened.n_bytes
        if self._watch_time:
            same = same and now.modified_ns == self.opened.modified_ns
        if not same:
            raise self.changed()
        return now

    def mapped(self) -> mmap.mmap:
        """Map the whole file, through the page cache.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        import mmap

        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _failed(self, error: OSError) -> StreamError:
        return StreamError(
            f"Reading '{self.path}' failed: {error.strerror or error}.", "Check the disk, and try again."
        )

    def changed(self) -> StreamError:
        """The error for content that has changed."""
        return StreamError(
            f"'{self.path}' was changed while the model was in use.",
            "Wait until its download or copy has finished, then load the model again.",
        )


@contextmanager
def _views_from(memories: Sequence[memoryview], start: int) -> Iterator[list[memoryview]]:
    """Return views of what follows the first `start` bytes of all memories."""
    views: list[memoryview] = []
    for memory in memories:
        if start < len(memory):
            views.append(memory[start:])
        start = max(start - len(memory), 0)
    try:
        yield views
    finally:
        for view in views:
            view.release()


def _open_direct(path: Path) -> int | None:
    """A descriptor for direct I/O; None if that does not work."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return _open_uncached(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return None
    try:
        import mmap

        # A read at an odd block fails if a larger alignment is required.
        with mmap.mmap(-1, 2 * BLOCK) as memory, memoryview(memory) as view, view[BLOCK:] as block:
            offset = BLOCK if os.fstat(descriptor).st_size > 2 * BLOCK else 0
            os.preadv(descriptor, [block], offset)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _open_uncached(path: Path) -> int | None:
    """Open a file on macOS, where caching is turned off for an open descriptor."""
    try:
        import fcntl

        no_cache: Any = getattr(fcntl, "F_NOCACHE", None)
        if no_cache is None:
            return None
        descriptor = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.fcntl(descriptor, no_cache, 1)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
