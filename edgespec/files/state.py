"""The state of a file, to notice changes since it was read without reading it again.

A file's size and modification time are not enough: copying tools and `touch` can set the time to anything.
The time of the last status change (ctime) cannot be set, and every write updates it. So a file counts as
unchanged if its inode, its size and both times are the same. Moving, linking or touching a file updates its
ctime too; then only its content can show whether it has changed.

The device number is deliberately left out. It is not stable across reboots on network and overlay file
systems, and a file on another device with the same inode and the same times to the nanosecond is a copy of
the whole file system.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.files.sharing import status_and_change

# The coarsest file time stamps; two writes within this interval may leave the same times.
_COARSEST_NS = 2_000_000_000
_SAMPLES, _SAMPLE_BYTES = 128, 64 << 10


@dataclass(frozen=True)
class FileState:
    """A file's metadata, which stays equal as long as nobody writes to it.

    Attributes:
        n_bytes: its size.
        modified_ns, changed_ns: when its content, and when its content or status, was last changed.
    """

    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """The state of the file at a path, following links, or of an open file's descriptor.

        Raises:
            OSError: there is no such file.
        """
        status, changed_ns = status_and_change(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, changed_ns)

    @property
    def settled(self) -> bool:
        """True if any later write will change the state, because the last one was long enough ago."""
        return time.time_ns() - self.changed_ns > _COARSEST_NS

    def __str__(self) -> str:
        return f"{self.inode} {self.n_bytes} {self.modified_ns} {self.changed_ns}"


def states_of(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """The states of a model's files, in order.

    Raises:
        OSError: one does not exist.
    """
    return tuple(FileState.of(path) for path in paths)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none, or a link that leads nowhere."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sampled_digest(path: Path) -> str:
    """A hash of a file's size and content: of all of it up to 8 MiB, else of 128 evenly spread samples.

    Models that were trained apart differ in nearly all of their bytes, and reading all takes minutes.

    Returns:
        16 hex digits.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
