"""A description of this machine, put together from the other modules here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.machine.cgroups import ROOT
from edgespec.machine.cores import Cores, probe_cores, usable_cores
from edgespec.machine.disks import Disk, disk_of
from edgespec.machine.gpus import Gpu, probe_gpus
from edgespec.machine.memory import FreeMemory, Memory, available_memory, probe_memory

__all__ = ["FreeMemory", "Machine", "available_memory", "disk_of", "probe", "usable_cores"]


@dataclass(frozen=True)
class Machine:
    """A machine, as far as it can be known."""

    cores: Cores
    memory: Memory
    disk: Disk  # of the path that was asked for
    gpus: tuple[Gpu, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that scripts get."""
        record = asdict(self)
        record["disk"]["path"] = str(self.disk.path)
        return record


def probe(path: Path | None = None, root: Path = ROOT) -> Machine:
    """Describe this machine; never fails.

    Args:
        path: whose disk to describe; None is the current folder.
        root: where /proc and /sys are.
    """
    return Machine(
        cores=probe_cores(root),
        memory=probe_memory(root),
        disk=disk_of(path or Path(), root),
        gpus=probe_gpus(root),
    )
