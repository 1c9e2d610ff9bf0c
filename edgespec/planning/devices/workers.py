"""Layers on this machine and on workers, which were measured: the fastest machines first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.base.option import named
from edgespec.base.units import readable
from edgespec.costs.layer_assignment import DeviceCapacity, assign_layers
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import (
    CLEARLY_FASTER,
    USUAL_ROWS,
    LayerAssignment,
    LayerDevices,
    hidden_bytes,
    in_words,
    layer_seconds,
    layer_sizes,
    room_here,
    transfer_seconds,
    usual_type,
)
from edgespec.planning.memory.needs import MemoryNeeds

if TYPE_CHECKING:
    from edgespec.workers.pool import WorkerPool

_MARGIN = 0.02  # of a worker's memory, for what its own process allocates


def assign_to_workers(
    workers: LayerDevices, needs: MemoryNeeds, files: ModelFiles, room: int, disk_rate: float | None = None
) -> LayerAssignment:
    """Give layers to the fastest machines, as far as their memory reaches.

    Args:
        needs: as if everything were on this machine.
        room: bytes that this machine may use.
        disk_rate: bytes that this machine's disk reads per second, to stream what no memory holds; None if
            nothing may be streamed.

    Raises:
        MemoryLimitError: all memories together do not hold the model, and nothing may be streamed.
    """
    own_s, *there_s = layer_seconds(workers, files)
    sizes = layer_sizes(files)
    first = needs.footprints[0]
    layer_bytes, here = room_here(needs, files, room)
    places = [DeviceCapacity(here, own_s)]
    hidden = hidden_bytes(files)
    for device, layer_s in zip(workers.devices, (CLEARLY_FASTER * s for s in there_s), strict=True):
        lent = int(device.free * (1 - _MARGIN)) - first.buffers
        places.append(DeviceCapacity(lent, layer_s, transfer_seconds(device, USUAL_ROWS * hidden)))
    counts = assign_layers(len(sizes), layer_bytes, places)
    if counts is None and disk_rate is not None:
        disk = DeviceCapacity(layer_bytes * len(sizes), max(own_s, layer_bytes / disk_rate))
        streamed = assign_layers(len(sizes), layer_bytes, [*places, disk])
        assert streamed is not None  # the disk holds everything
        counts = (streamed[0] + streamed[-1], *streamed[1:-1])
    if counts is None:
        lent = sum(device.free for device in workers.devices)
        whole = needs.total
        raise MemoryLimitError(
            f"The model needs {readable(whole)} of memory; this machine has {readable(room)}, "
            f"and the workers lend {readable(lent)}.",
            f"Add workers, or leave out {named('offload', 'none')}: other layers are then streamed.",
            least=whole,
        )
    where = in_words(counts[0], counts[1:], [device.name for device in workers.devices])
    return replace(LayerAssignment.of(files, counts[0], counts[1:]), where=where, key=where)


def workers_in_words(workers: LayerDevices, files: ModelFiles) -> list[str]:
    """The memory, speed and distance of workers, in sentences."""
    here, *there = layer_seconds(workers, files)
    return [
        f"{d.name} lends {readable(d.free)} and is {d.ping_s * 1e3:.1f} ms away; products take "
        f"{seconds / here:.1f} times as long there as here."
        for d, seconds in zip(workers.devices, there, strict=True)
    ]


def measure_workers(addresses: Sequence[str], files: ModelFiles, threads: int) -> WorkerPool:
    """Workers that were measured, and are free again.

    Raises:
        BackendError, WorkerError: as WorkerPool.
    """
    from edgespec.workers.address import parse_addresses
    from edgespec.workers.pool import WorkerPool

    workers = WorkerPool(parse_addresses(",".join(addresses)), type_id=usual_type(files), n_threads=threads)
    workers.close()
    return workers
