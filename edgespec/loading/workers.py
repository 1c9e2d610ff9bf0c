"""Other machines that hold layers of the target: connecting them, and spreading the layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.costs.spread import Place, spread_layers
from edgespec.errors import MemoryLimitError
from edgespec.loading.models import open_model
from edgespec.loading.spreading import (
    CLEARLY_FASTER,
    USUAL_ROWS,
    Spread,
    hidden_bytes,
    in_words,
    layer_seconds,
    layer_sizes,
    room_here,
    usual_type,
    way_seconds,
)
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.device_layers import DeviceLayers
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.remote_layers import RemoteLayers
from edgespec.offload.planning.budget import MemoryPlan, bytes_needed, memory_room
from edgespec.offload.planning.needs import Needs
from edgespec.units import readable
from edgespec.workers.address import parse_addresses
from edgespec.workers.crew import Crew, LentDevice

_MARGIN = 0.02  # of a worker's memory, for what its own process allocates


def connect(files: ModelFiles, state: LoadState) -> Crew | None:
    """The workers that were named; None if there are none, or none that answers where that is allowed.

    Raises:
        BackendError, WorkerError: as Crew.
    """
    options = state.options
    if not options.workers:
        return None
    crew = Crew(
        parse_addresses(",".join(options.workers)),
        type_id=usual_type(files),
        n_threads=state.n_threads,
        leave_out_missing=options.leave_out_missing,
    )
    state.warnings += [f"{error.what} Going on without it." for error in crew.missing]
    state.warnings += [
        f"The worker {address} is in no private network: others may read what is sent to it."
        for address in crew.unguarded
    ]
    state.notes += [
        f"The worker {device.name} lends {readable(device.free)}; it is {device.ping_s * 1e3:.1f} ms away."
        for device in crew.devices
    ]
    if not crew.devices:
        crew.close()
        return None
    return crew


def spread_over(
    devices: Sequence[LentDevice], needs: Needs, files: ModelFiles, room: int, speeds: Sequence[float]
) -> Spread:
    """Where layers go: to the fastest machines, as far as their memory reaches.

    Args:
        needs: as if everything were on this machine.
        room: bytes that this machine may use.
        speeds: seconds of a pass over one layer, here and then on each device.

    Raises:
        MemoryLimitError: all memories together do not hold the model.
    """
    sizes = layer_sizes(files)
    first = needs.footprints[0]
    layer_bytes, here = room_here(needs, files, room)
    places = [Place(here, speeds[0])]
    hidden = hidden_bytes(files)
    for device, layer_s in zip(devices, (CLEARLY_FASTER * s for s in speeds[1:]), strict=True):
        lent = int(device.free * (1 - _MARGIN)) - first.buffers
        places.append(Place(lent, layer_s, way_seconds(device, USUAL_ROWS * hidden)))
    counts = spread_layers(len(sizes), layer_bytes, places)
    if counts is None:
        lent = sum(device.free for device in devices)
        whole = bytes_needed(needs.footprints, needs.process)
        raise MemoryLimitError(
            f"The model needs {readable(whole)} of memory; this machine has {readable(room)}, "
            f"and the workers lend {readable(lent)}.",
            "Name more workers, or leave out --workers: layers cannot be streamed from disk beside workers "
            "yet, and from this machine alone they can.",
            least=whole,
        )
    where = in_words(counts[0], counts[1:], [device.name for device in devices])
    return Spread(counts[0], counts[1:], sum(sizes[counts[0] :]), where, where)


def plan_for_crew(crew: Crew, needs: Needs, files: ModelFiles, state: LoadState) -> tuple[MemoryPlan, Spread]:
    """The memory plan where workers hold layers, and which they hold; raises as spread_over."""
    room = memory_room(state.options.memory)
    spread = spread_over(crew.devices, needs, files, room, layer_seconds(crew, files))
    state.notes.append(f"Layers: {spread.where}.")
    return MemoryPlan(room, memory_map=False), spread


def open_on_workers(path: Path, spread: Spread, crew: Crew, state: LoadState) -> Model:
    """The target, with its last layers on workers.

    Raises:
        WorkerError: a worker was lost meanwhile.
        ModelFileError, MemoryLimitError: it cannot be loaded.
    """
    borrowed = crew.borrow(lambda: state.abort.is_set)
    used = [(device, n) for device, n in zip(borrowed, spread.counts, strict=True) if n]
    weights = RemoteLayers(lost=crew.lost, release=crew.close)
    layers = DeviceLayers(tuple(device for device, _ in used), tuple(n for _, n in used))
    return open_model(path, state, memory_map=False, weights=weights, devices=layers)
