"""The machine that was measured: processor, memory, disk and versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgespec.machine.cores import probe_cores
from edgespec.machine.disks import disk_of
from edgespec.machine.memory import probe_memory
from edgespec.version import __version__


def describe_machine(path: Path) -> dict[str, Any]:
    """The machine, and the disk that a file is on."""
    cores, memory, disk = probe_cores(), probe_memory(), disk_of(path)
    return {
        "cpu": cores.model,
        "cores": cores.usable,
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "disk": f"{disk.kind} {disk.device}".strip(),
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str | None]:
    """The versions of EdgeSpec, of llama.cpp's bindings, and of Python."""
    return {
        "edgespec": __version__,
        "llama-cpp-python": _version("llama-cpp-python"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
