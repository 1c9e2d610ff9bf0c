"""Files that can be made again: checked when they are read, and limited in size together.

Each is written atomically, with a checksum; a damaged one counts as missing. When there is no room for
another one, the least recently used go first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from edgespec.files.writing import atomic_write

_MAGIC = b"EDGEKV01"
_HEAD = len(_MAGIC) + 4
_UNFINISHED = ".part"
_ABANDONED_S = 3600.0
_AT_ONCE = 64  # when files have to go, so many parts of one in all go together: looking for them takes time


class CheckedFiles:
    """The files in a folder; any thread may use them, and so may other programs.

    Args:
        folder: created when the first file is written.
        limit: most bytes in the folder; None for any number. They are never more than half of what the disk
            has room for beside them.
        retry_s: seconds after a failed write until the next one is tried.

    Attributes:
        failure: why the last write failed; empty if it did not.
        on_change: called, from any thread, with `failure` when writing fails and when it works again.
    """

    def __init__(self, folder: Path, limit: int | None = None, *, retry_s: float = 30.0) -> None:
        self.folder = folder
        self.failure = ""
        self.on_change: Callable[[str], None] = lambda _failure: None
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._failed_bytes = 0
        self._limit = limit
        self._total: int | None = None  # bytes in the folder; None until they were counted
        self._most = 0  # bytes that may be in it
        self._lock = threading.Lock()

    def names(self) -> set[str]:
        try:
            return {name for name in os.listdir(self.folder) if not name.startswith(".")}  # noqa: PTH208
        except OSError:
            return set()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def used(self, names: Sequence[str]) -> None:
        """Note that files were of use; the first of them are kept the longest."""
        now = time.time_ns()
        for place, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self.folder / name, ns=(now - 1000 * place,) * 2)

    def read(self, name: str) -> bytearray | None:
        """The content of a file; None if there is none, or only a damaged one, which is removed."""
        try:
            with (self.folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size - _HEAD
                start = file.read(_HEAD)
                content = bytearray(max(size, 0))
                whole = file.readinto(content) == size
            if whole and start == _MAGIC + zlib.crc32(content).to_bytes(4, "little"):
                return content
        except OSError:
            pass
        self.discard(name)
        return None

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file, unless it is larger than the limit; sets `failure` if that is impossible.

        After a failure, nothing is tried for a while.
        """
        if self.is_resting:
            return
        data = memoryview(content).cast("B")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._make_room(_HEAD + len(data)):
                return
            with atomic_write(self.folder / name, durable=False, suffix=_UNFINISHED) as file:
                file.write(_MAGIC + zlib.crc32(data).to_bytes(4, "little"))
                file.write(data)
        except OSError as error:
            self._retry_at = time.monotonic() + self._retry_s
            with self._lock:
                self._total = None  # the disk may have less room than it had
            self._failed_bytes = len(data)
            self._changed_to(f"{self.folder} cannot be written: {error.strerror}")
        else:
            if len(data) >= self._failed_bytes:  # a nearly full disk takes small files only
                self._changed_to("")

    @property
    def is_resting(self) -> bool:
        """True if a write has failed lately, so that none is tried."""
        return bool(self.failure) and time.monotonic() < self._retry_at

    def _changed_to(self, failure: str) -> None:
        with self._lock:
            before, self.failure = self.failure, failure
        if bool(before) != bool(failure):
            self.on_change(failure)

    def discard(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _make_room(self, size: int) -> bool:
        """True if there is room for so many bytes, after removing other files if need be."""
        with self._lock:
            if self._total is None:
                self._sweep()
            elif self._limit is None or self._total + size <= self._most:
                self._total += size
                return True
            files = []
            for name in self.names():
                with contextlib.suppress(OSError):
                    status = (self.folder / name).stat()
                    files.append((status.st_mtime_ns, status.st_size, name))
            total = sum(n_bytes for _, n_bytes, _ in files)
            if self._limit is not None:
                self._most = min(self._limit, total + shutil.disk_usage(self.folder).free // 2)
                if size > self._limit:
                    return False
                if size > self._most:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                kept = len(files) if total + size <= self._most else len(files) - len(files) // _AT_ONCE
                for gone, (_, n_bytes, name) in enumerate(sorted(files)):
                    if total + size <= self._most and len(files) - gone <= kept:
                        break
                    self.discard(name)
                    total -= n_bytes
            self._total = total + size
            return True

    def _sweep(self) -> None:
        """Remove what killed writers have left behind."""
        for path in self.folder.glob(f".*{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()
