"""Control groups: the folders in which Linux keeps what a container may use, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cgroups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The version and folder of each group around this process that `controller` may be set in.

    The innermost comes first; a limit in any of them holds for everything inside. Folders that a
    container does not see are among them.

    Args:
        controller: "cpu" or "memory".
        root: where /proc and /sys are.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line + "::").split(":")[:3]
        if controllers == "":
            for top in (mount, mount / "unified"):  # where version 1 is used beside it
                yield from ((2, folder) for folder in _upwards(top, path))
        elif controller in controllers.split(","):
            for top in dict.fromkeys((mount / controllers, mount / controller)):
                yield from ((1, folder) for folder in _upwards(top, path))


def read_text(path: Path) -> str:
    """What a file of the system says, without the space around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n\t ")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """A whole number in a file of the system; None if there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _upwards(top: Path, path: str) -> Iterator[Path]:
    folder = top / path.lstrip("/")
    while folder.is_relative_to(top):
        yield folder
        folder = folder.parent
