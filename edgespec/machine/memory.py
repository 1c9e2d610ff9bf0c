"""Memory: how much there is, how much is available, and how much this process uses."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.base.libraries import c_library
from edgespec.machine.cgroups import ROOT, cgroups, read_number, read_text
from edgespec.processes.limits import address_space

_NO_LIMIT = 2**60  # version 1 of control groups writes a huge number for no limit

# By version of control groups: the limits, the usage, and the page cache within it. All of that cache can be
# reclaimed: a file that was read twice is "active", and in memory for no other reason.
_GROUP_FILES = {
    1: (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


PROCESS_BYTES = 96 << 20
"""The interpreter and its libraries. In another program, memory beyond this is that program's own."""

_MARGIN = 0.05  # of free memory, left for other programs


@dataclass(frozen=True)
class Memory:
    """Memory, in bytes."""

    total: int  # what the machine has
    available: int  # what can be used without swapping, within container limits
    # the tightest limit of the containers of this process; None without one
    container_limit: int | None = None
    # swap space
    swap_total: int = 0
    swap_used: int = 0
    address_space: int | None = None  # this process's limit on addresses (ulimit -v); None without one


@dataclass(frozen=True)
class FreeMemory:
    """Free memory at one moment, so that decisions that must agree rest on one reading."""

    available: int  # bytes that can be used without swapping, within container limits
    own: int = 0  # bytes that EdgeSpec's process holds already, which a budget includes

    @classmethod
    def read(cls) -> FreeMemory:
        return cls(available_memory(), min(int(psutil.Process().memory_info().rss), PROCESS_BYTES))

    def budget(self, asked: int | None = None) -> int:
        """Bytes that everything may take: as many as were asked for, but no more than there are.

        If nothing was asked for, a margin is left to other programs.
        """
        most = self.available + self.own
        return min(asked, most) if asked is not None else int(most * (1 - _MARGIN))


def probe_memory(root: Path = ROOT) -> Memory:
    """The memory of this machine; what is unknown has its default."""
    virtual = psutil.virtual_memory()
    rows = _meminfo(root)
    swap_total, swap_free = rows.get("SwapTotal"), rows.get("SwapFree")
    if swap_total is None or swap_free is None:
        swap_total, swap_free = _swap_elsewhere()
    return Memory(
        total=rows.get("MemTotal", int(virtual.total)),
        available=available_memory(root),
        container_limit=min((limit for limit, _ in _limits(root)), default=None),
        swap_total=swap_total,
        swap_used=swap_total - swap_free,
        address_space=address_space(),
    )


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be used without swapping, within container limits."""
    free = _meminfo(root).get("MemAvailable") if root != ROOT else None
    free = int(psutil.virtual_memory().available) if free is None else free
    return min([free, *(room for _, room in _limits(root))])


def release_free_memory() -> None:
    """Return memory that was freed to the system: garbage that is in cycles, and what malloc keeps (glibc).

    It takes a fraction of a second, so it is for times when nothing else is to be done.
    """
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return to the system what malloc keeps of freed memory (glibc); takes milliseconds."""
    if sys.platform == "linux":
        trim = getattr(c_library(), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and available bytes of each memory control group of this process."""
    for version, folder in cgroups("memory", root):
        limits, usage, page_cache = _GROUP_FILES[version]
        numbers = [read_number(folder / name) for name in limits]  # "max" is no number
        limit = min((number for number in numbers if number is not None), default=_NO_LIMIT)
        used = read_number(folder / usage)
        if limit >= _NO_LIMIT or used is None:
            continue
        stat = dict(row.split()[:2] for row in read_text(folder / "memory.stat").splitlines() if " " in row)
        cached = sum(int(stat[name]) for name in page_cache if stat.get(name, "").isdigit())
        yield limit, min(max(limit - used + cached, 0), limit)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    rows = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            rows[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return rows


def _swap_elsewhere() -> tuple[int, int]:
    """Total and free swap space, on systems without /proc."""
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return 0, 0
    return int(swap.total), int(swap.free)
