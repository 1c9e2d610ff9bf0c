"""Disks: the device and file system that hold a path."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.user_folders import expanded
from edgespec.machine.cgroups import ROOT, read_number, read_text

NVME, SSD, HDD, VIRTUAL = "nvme", "ssd", "hdd", "virtual"
NETWORK, TMPFS, OVERLAY, UNKNOWN = "network", "tmpfs", "overlay", "unknown"

_KINDS = {
    "tmpfs": TMPFS,
    "ramfs": TMPFS,
    "overlay": OVERLAY,
    "aufs": OVERLAY,
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "smbfs", "afpfs", "9p", "virtiofs"), NETWORK),
    **dict.fromkeys(("ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.rclone"), NETWORK),
}


@dataclass(frozen=True)
class Disk:
    """The disk that holds a path."""

    path: Path  # that path, or the nearest folder above it that exists
    device: str  # its name, such as /dev/nvme0n1p2; empty if there is none
    # "nvme", "ssd", "hdd", "virtual" (of a virtual machine, with unknown hardware), "network", "tmpfs"
    # (memory), "overlay" (of a container) or "unknown"
    kind: str
    file_system: str  # such as ext4
    # bytes
    free: int
    total: int
    direct: bool | None = None  # whether files on it can be read with direct I/O; None if that was not tried


def disk_of(path: Path, root: Path = ROOT, *, number_of: tuple[int, int] | None = None) -> Disk:
    """The disk of a path, which need not exist yet.

    Args:
        root: where /proc and /sys are.
        number_of: the device's major and minor number; None asks the system.
    """
    place = _nearest(path)
    if number_of is None:
        number_of = _device_number(place)
    device, file_system = _mount(root, place, number_of)
    if not device and not file_system:
        device, file_system = _mount_elsewhere(place)
    try:
        usage = shutil.disk_usage(place)
        free, total = usage.free, usage.total
    except OSError:
        free = total = 0
    kind = _KINDS.get(file_system) or _kind_of_device(root, number_of, device)
    return Disk(place, device, kind, file_system, free, total, _reads_directly(place))


def file_system_id(path: Path, root: Path = ROOT, *, number: int | None = None) -> str:
    """An identifier of a path's file system that another disk does not get after a restart.

    Args:
        root: where /dev is.
        number: of the device; None asks the system.

    Raises:
        OSError: there is no such path.
    """
    number = path.stat().st_dev if number is None else number
    if sys.platform == "win32":
        return str(number)  # the serial number of the volume
    for link in sorted((root / "dev/disk/by-uuid").glob("*")):
        with suppress(OSError):
            if link.stat().st_rdev == number:
                return link.name
    return str(os.statvfs(path).f_fsid or number)  # made of a UUID by most file systems


def _nearest(path: Path) -> Path:
    try:
        place = expanded(path).absolute()
    except OSError:  # the current folder was removed
        return Path(path.anchor or os.sep)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        return place.resolve()
    except (OSError, RuntimeError):  # circular links
        return place


def _device_number(place: Path) -> tuple[int, int] | None:
    if sys.platform == "win32":
        return None  # there are no such numbers
    try:
        found = place.stat().st_dev
        return os.major(found), os.minor(found)
    except OSError:
        return None


def _mount(root: Path, place: Path, wanted: tuple[int, int] | None) -> tuple[str, str]:
    """Device and file system of the mount that contains a path, from /proc/self/mountinfo."""
    best, found = -1, ("", "")
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, dash, right = line.partition(" - ")
        fields, ends = left.split(), right.split()
        if not dash or len(fields) < 5 or len(ends) < 2:
            continue
        point = Path(_unescaped(fields[4]))
        if not place.is_relative_to(point):
            continue
        # The deepest mount, and the last of several at one mount point. Some file systems give files a
        # different device number from their mount, so the number alone does not decide.
        depth = 2 * len(point.parts) + (wanted is not None and fields[2] == f"{wanted[0]}:{wanted[1]}")
        if depth >= best:
            best, found = depth, (_unescaped(ends[1]), ends[0])
    return found


def _unescaped(field: str) -> str:
    """mountinfo writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _mount_elsewhere(place: Path) -> tuple[str, str]:
    """Return the mount point on macOS and Windows."""
    try:
        parts = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    except (OSError, RuntimeError):
        return "", ""
    best = max(parts, key=lambda part: len(part.mountpoint), default=None)
    return (best.device, best.fstype) if best else ("", "")


def _kind_of_device(root: Path, wanted: tuple[int, int] | None, device: str) -> str:
    """The kind of a block device, by its folder in /sys; of a composite one, its slowest part."""
    folders = []
    if wanted is not None:
        folders.append(root / "sys/dev/block" / f"{wanted[0]}:{wanted[1]}")
    if device.startswith("/dev/"):
        folders.append(root / "sys/class/block" / device.removeprefix("/dev/").replace("/", "!"))
    for folder in folders:
        if folder.exists():
            return _kind_of_folder(folder.resolve())
    return UNKNOWN


def _kind_of_folder(folder: Path) -> str:
    if (folder / "partition").exists():
        folder = folder.parent
    below = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
    if below:
        kinds = {_kind_of_folder(slave.resolve()) for slave in below}
        return next((kind for kind in (UNKNOWN, HDD, VIRTUAL, SSD, NVME) if kind in kinds), UNKNOWN)
    if folder.name.startswith("nvme"):
        return NVME
    if folder.name.startswith(("vd", "xvd")):
        return VIRTUAL  # its other properties are made up
    if folder.name.startswith(("zram", "ram")):
        return TMPFS
    if folder.name.startswith(("nbd", "rbd")):
        return NETWORK
    return {0: SSD, 1: HDD}.get(_rotates(folder), UNKNOWN)


def _rotates(folder: Path) -> int:
    turning = read_number(folder / "queue/rotational")
    return -1 if turning is None else turning


def _reads_directly(place: Path) -> bool | None:
    """True if direct I/O works, None if unknown: tried on the file itself, or on any file in the folder."""
    try:
        file = place if place.is_file() else next((p for p in place.iterdir() if p.is_file()), None)
        if file is None:
            return None
        reader = FileReader(file)
    except (OSError, StreamError):
        return None
    reader.close()
    return reader.direct
