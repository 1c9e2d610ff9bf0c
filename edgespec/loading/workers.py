"""Other machines that hold layers of the target: connecting them, and spreading the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.costs.spread import Place, RemotePart, spread_layers
from edgespec.errors import MemoryLimitError
from edgespec.kernels.report import ROWS
from edgespec.kernels.report_store import stored_report
from edgespec.kernels.setting import PLAIN
from edgespec.loading.models import open_model
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.remote_layers import RemoteLayers
from edgespec.offload.planning.budget import MemoryPlan, memory_room
from edgespec.offload.planning.needs import Needs
from edgespec.units import readable
from edgespec.workers.address import parse_addresses
from edgespec.workers.crew import Crew, LentDevice

_MARGIN = 0.02  # of a worker's memory, for what its own process allocates
_LAYER_DESCRIPTION = 11 << 10  # bytes that tell a worker what to compute for a layer
_ROW_MASK = 1 << 10  # bytes that tell a worker which cells a row sees, in a text of usual length
_CLEARLY_FASTER = 1.15  # than this machine a worker must be, to get layers that there is room for here
_USUAL_ROWS = 8  # of the passes for which layers are spread


@dataclass(frozen=True)
class Spread:
    """Where the layers of a model are.

    Attributes:
        here: layers on this machine.
        counts: layers on each device of the workers.
        lent_bytes: of weights that are not on this machine.
        where: the same in words; also for keys of what depends on it.
    """

    here: int
    counts: tuple[int, ...]
    lent_bytes: int
    where: str = ""


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
    cells = first.cache // max(len(sizes), 1)
    largest = max(sizes, default=0) + cells
    others = needs.process + sum(f.total for f in needs.footprints[1:])
    beside = first.weights - sum(sizes)  # embeddings and output stay here
    here = room - others - first.buffers - beside
    places = [Place(here, speeds[0])]
    hidden = hidden_bytes(files)
    for device, layer_s in zip(devices, (_CLEARLY_FASTER * s for s in speeds[1:]), strict=True):
        lent = int(device.free * (1 - _MARGIN)) - first.buffers
        places.append(Place(lent, layer_s, way_seconds(device, _USUAL_ROWS * hidden)))
    counts = spread_layers(len(sizes), largest, places)
    if counts is None:
        lent = sum(device.free for device in devices)
        raise MemoryLimitError(
            f"The model needs {readable(first.total + others)} of memory; this machine has {readable(room)}, "
            f"and the workers lend {readable(lent)}.",
            "Name more workers, or leave out --workers: layers cannot be streamed from disk beside workers "
            "yet, and from this machine alone they can.",
            least=first.total + others,
        )
    used = [(count, device.name) for count, device in zip(counts[1:], devices, strict=True) if count]
    where = ", ".join([f"{counts[0]} here", *(f"{count} on {name}" for count, name in used)])
    return Spread(counts[0], counts[1:], sum(sizes[counts[0] :]), where)


def way_seconds(device: LentDevice, n_bytes: float) -> float:
    """Seconds in which activations of so many bytes get to a device and back."""
    return max(device.way.at(n_bytes), device.ping_s)


def plan_for_crew(crew: Crew, needs: Needs, files: ModelFiles, state: LoadState) -> tuple[MemoryPlan, Spread]:
    """The memory plan where workers hold layers, and which they hold; raises as spread_over."""
    room = memory_room(state.options.memory)
    spread = spread_over(crew.devices, needs, files, room, layer_seconds(crew, files))
    state.notes.append(f"Layers: {spread.where}.")
    return MemoryPlan(room, memory_map=False), spread


def remote_parts(spread: Spread, crew: Crew, files: ModelFiles) -> list[RemotePart]:
    """What passes take on the machines that hold layers, and to get there."""
    sizes, total = layer_sizes(files), files.tensor_bytes
    own = [seconds * _kernel_share(usual_type(files), at) for at, seconds in enumerate(crew.own_seconds)]
    parts, start = [], spread.here
    for count, device in zip(spread.counts, crew.devices, strict=True):
        if count:
            slowness = {
                rows: there / here for rows, there, here in zip(ROWS, device.seconds, own, strict=True)
            }
            share = sum(sizes[start : start + count]) / total
            row = hidden_bytes(files) + _ROW_MASK
            parts.append(RemotePart(share, slowness, device.way, count * _LAYER_DESCRIPTION, row))
        start += count
    return parts


def open_on_workers(path: Path, spread: Spread, crew: Crew, state: LoadState) -> Model:
    """The target, with its last layers on workers.

    Raises:
        WorkerError: a worker was lost meanwhile.
        ModelFileError, MemoryLimitError: it cannot be loaded.
    """
    borrowed = crew.borrow(lambda: state.abort.is_set)
    used = [(device, n) for device, n in zip(borrowed, spread.counts, strict=True) if n]
    weights = RemoteLayers(
        [device for device, _ in used], [n for _, n in used], lost=crew.lost, release=crew.close
    )
    return open_model(path, state, memory_map=False, weights=weights, gpu_layers=weights.gpu_layers)


def layer_seconds(crew: Crew, files: ModelFiles, rows: int = _USUAL_ROWS) -> list[float]:
    """Seconds of a pass over one layer of usual size: here, and then on each device of the crew."""
    sizes = layer_sizes(files)
    at = ROWS.index(rows)
    per_byte = [crew.own_seconds[at] * _kernel_share(usual_type(files), at)]
    per_byte += [device.seconds[at] for device in crew.devices]
    return [seconds * sum(sizes) / max(len(sizes), 1) for seconds in per_byte]


def _kernel_share(type_id: int, at: int) -> float:
    """The time that products take here relative to weights as they are in files, by the layout in use."""
    report = stored_report()
    measured = report.seconds.get(type_id, {}) if report is not None else {}
    fastest = min((seconds[at] for seconds in measured.values()), default=0.0)
    return fastest / measured[PLAIN][at] if measured.get(PLAIN) else 1.0


def usual_type(files: ModelFiles) -> int:
    """The quantization of most bytes of a model."""
    by_type: dict[int, int] = {}
    for header in files.headers:
        for tensor in header.tensors:
            if len(tensor.shape) > 1:
                by_type[tensor.type_id] = by_type.get(tensor.type_id, 0) + tensor.n_bytes
    return max(by_type, key=lambda type_id: by_type[type_id])


def layer_sizes(files: ModelFiles) -> list[int]:
    """Bytes of each layer: everything that is named after it."""
    sizes: dict[int, int] = {}
    for header in files.headers:
        for tensor in header.tensors:
            parts = tensor.name.split(".")
            if parts[0] == "blk" and parts[1].isdigit():
                sizes[int(parts[1])] = sizes.get(int(parts[1]), 0) + tensor.n_bytes
    return [sizes[index] for index in sorted(sizes)]


def hidden_bytes(files: ModelFiles) -> int:
    """Bytes of a row of activations between two layers."""
    header = files.headers[0]
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    return 4 * width if isinstance(width, int) else 0
