"""Reading weights with direct I/O, bypassing the page cache.

A model larger than memory gains nothing from the page cache, which its own reads would flush, and buffered
reads cost a copy. So files are read directly into the memory where the weights are used, if the system and
the file system allow it (see `positioned`). Otherwise reads are buffered, and the cache is told to drop the
pages afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import StreamError
from edgespec.files.positioned import BLOCK, NotDirect, open_positioned
from edgespec.files.state import FileState

if TYPE_CHECKING:
    import mmap


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

    def __init__(self, path: Path, *, direct: bool | None = None) -> None:
        self.path = path
        try:
            self._file = open_positioned(path, direct=direct)
            self.direct = self._file.direct
            self.opened = self._file.state()
        except NotDirect as error:
            raise StreamError(
                f"'{path}' cannot be read directly.", "Its file system does not allow it."
            ) from error
        except OSError as error:
            raise self._failed(error) from error
        self.n_bytes = self.opened.n_bytes

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
                    n = self._file.read(rest, offset + start)
                if start + n <= done:
                    break
                done = start + n
            self._file.drop(offset, wanted)
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
            now = self._file.state()
        except OSError as error:
            raise self._failed(error) from error
        if (now.n_bytes, now.modified_ns) != (self.opened.n_bytes, self.opened.modified_ns):
            raise self.changed()
        return now

    def mapped(self) -> mmap.mmap:
        """Map the whole file, through the page cache.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        return self._file.mapped()

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        self._file.close()

    def _failed(self, error: OSError) -> StreamError:
        return StreamError(
            f"Reading '{self.path}' failed: {error.strerror or error}.", "Check the disk, and try again."
        )

    def changed(self) -> StreamError:
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
