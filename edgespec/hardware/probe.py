"""What this machine has: memory that may be used, and what the process uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be used without swapping: the system's, or less inside a container."""
    return min([int(psutil.virtual_memory().available), *_container_room()])


def usable_cores() -> int:
    """Cores this process may run on; affinity counted."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def peak_rss() -> int:
    """Most bytes of memory this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _container_room() -> list[int]:
    """Bytes left in each memory control group around this process, versions 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rooms += _rooms(
                _CGROUPS / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return rooms


def _rooms(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Room in a group and in all groups around it; a limit holds for everything inside."""
    group = root / path.lstrip("/")
    rooms = []
    while group.is_relative_to(root):
        try:
            most = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
            stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            if most != "max" and int(most) < 2**60:  # version 1 writes a huge number for none
                rooms.append(max(int(most) - used + int(stat.get(reclaimable, 0)), 0))
        except (OSError, ValueError):
            pass  # outside a container's view, or no such limit
        group = group.parent
    return rooms
