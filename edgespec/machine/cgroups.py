"""Linux control groups, versions 1 and 2, which limit what a container may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cgroups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The version and folder of each control group of this process in which `controller` may be limited.

    The innermost comes first; a limit in any of them applies to everything inside. Some folders may not be
    visible in a container.

    Args:
        controller: "cpu" or "memory".
        root: where /proc and /sys are.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)  # a path may have colons, as those of containerd do
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            for top in (mount, mount / "unified"):  # the latter if version 1 is used as well
                yield from ((2, folder) for folder in _upwards(top, path))
        elif controller in controllers.split(","):
            for top in dict.fromkeys((mount / controllers, mount / controller)):
                yield from ((1, folder) for folder in _upwards(top, path))


def read_text(path: Path) -> str:
    """The content of a system file, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n\t ")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The integer in a system file; None if there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _upwards(top: Path, path: str) -> Iterator[Path]:
    folder = top / path.lstrip("/")
    while folder.is_relative_to(top):
        yield folder
        folder = folder.parent
