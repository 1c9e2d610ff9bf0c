"""Whether a file is still the one that was read, told without reading it.

A file's size and modification time are not enough: copying tools and `touch` set the time to what they
like. Nobody can set the time of the last change of a file's status (ctime), which every write moves. So a
file counts as the same if its inode, its size and both times are what they were. Moving, linking or touching
a file moves its ctime too: whoever only knows this state then has to look at the content, or to do without.

The device is left out on purpose. Its number is not stable across reboots on network and overlay file
systems, and an equal inode with equal times to the nanosecond on another device is a copy made block by
block. On Windows, ctime is the time of creation, and tells nothing of later writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Times are as coarse as this on some file systems; within it, two writes may leave the same times.
_COARSEST_NS = 2_000_000_000


@dataclass(frozen=True)
class FileState:
    """What the system says of a file; equal for as long as nobody writes to it.

    Attributes:
        n_bytes: its size.
        modified_ns, changed_ns: when its content, and its content or status, was changed last.
    """

    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of the file at a path, links followed.

        Raises:
            OSError: there is none.
        """
        return cls.of_status(path.stat())

    @classmethod
    def of_status(cls, status: os.stat_result) -> FileState:
        """The state in the answer of stat or fstat."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether any write from now on is bound to show: the last one was not a moment ago."""
        return time.time_ns() - self.changed_ns > _COARSEST_NS

    def __str__(self) -> str:
        return f"{self.inode} {self.n_bytes} {self.modified_ns} {self.changed_ns}"


def states_of(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """The states of a model's files, in order.

    Raises:
        OSError: one is not there.
    """
    return tuple(FileState.of(path) for path in paths)
