"""The speed at which the disks of folders read: recalled, or measured with a file that is removed again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.base.progress import Progress
from edgespec.errors import StreamError
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key

_FILE_BYTES = 128 << 20
_BLOCK_BYTES = 4 << 20
_SECONDS = 2.0
_UNKNOWN = 1e9  # bytes per second of a disk that cannot be measured


def folder_rates(folders: Sequence[Path], store: ProfileStore, on_progress: Progress) -> list[float]:
    """Bytes per second that the disk of each folder reads; what is measured for it is stored.

    All are of the same kind, so that they can be compared: from passes if all have read for some, which is
    slower than reading alone, and otherwise from reading alone.
    """
    disks = [_disk(folder, store, on_progress) for folder in folders]
    if all(disk.streamed_rate for disk in disks):
        return [disk.streamed_rate for disk in disks]
    return [disk.direct or disk.buffered or _UNKNOWN for disk in disks]


def known_rates(folders: Sequence[Path], store: ProfileStore) -> list[float] | None:
    """As `folder_rates`, without measuring anything; None if a disk was not measured yet."""
    try:
        disks = [store.disk(disk_key(folder)) for folder in folders]
    except OSError:
        return None
    rates = [disk.speed for disk in disks if disk is not None]
    return rates if len(rates) == len(folders) and all(rates) else None


def _disk(folder: Path, store: ProfileStore, on_progress: Progress) -> DiskProfile:
    """The profile of a folder's disk; reading alone is measured now if it was not."""
    key = disk_key(folder)
    known = store.disk(key) or DiskProfile(0.0, 0.0, 0, 0)
    if known.direct or known.buffered:
        return known
    try:
        measured = _measured(folder, on_progress)
    except (OSError, StreamError):  # no room, for instance, which packing will say
        return known
    return store.put_reading(key, measured)


def _measured(folder: Path, on_progress: Progress) -> DiskProfile:
    from edgespec.measure.throughput import measure_reading

    on_progress(f"Measuring the disk of {folder}", 0.0)
    # A temporary file that is open could not be opened again on Windows.
    with TemporaryDirectory(dir=folder, prefix=".edgespec-speed-") as inside:
        path = Path(inside, "blocks")
        with path.open("wb") as file:
            block = os.urandom(_BLOCK_BYTES)  # a disk may compress zeros
            for _ in range(_FILE_BYTES // _BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return measure_reading(path, _SECONDS, on_progress)
