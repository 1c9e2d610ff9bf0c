"""Workers, machines that hold layers of the target: connecting them, and assigning layers."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.base.units import readable
from edgespec.errors import EdgeSpecError
from edgespec.llama.runtime.device_layers import DeviceLayers
from edgespec.llama.runtime.weight_store import AllInMemory
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import LayerAssignment, usual_type
from edgespec.workers.address import parse_addresses
from edgespec.workers.pool import WorkerPool


class RemoteLayers(AllInMemory):
    """Notices that a machine is gone: a `WeightStore`.

    Args:
        lost: gives an error if a machine is gone; called around every decode.
        release: ends the connections, once the model is freed.
        setup_s: total seconds that passes have spent on one-time setup for their number of rows.
    """

    def __init__(
        self,
        *,
        lost: Callable[[], EdgeSpecError | None],
        release: Callable[[], None],
        setup_s: Callable[[], float],
    ) -> None:
        self._lost = lost
        self._release = release
        self._setup_s = setup_s

    @property
    def setup_s(self) -> float:
        """Total seconds that passes have spent on one-time setup for their number of rows."""
        return self._setup_s()

    def failure(self) -> EdgeSpecError | None:
        """An error if a machine is gone."""
        return self._lost()

    def close(self) -> None:
        """End the connections, after the model has been freed."""
        self._release()


def connect(files: ModelFiles, state: LoadState) -> WorkerPool | None:
    """The workers that were named; None if none answers and that is allowed."""
    devices = state.config.devices
    workers = WorkerPool(
        parse_addresses(",".join(devices.workers)),
        type_id=usual_type(files),
        n_threads=state.n_threads,
        leave_out_missing=devices.leave_out_missing,
    )
    state.warnings += [f"{error.what} Continuing without it." for error in workers.missing]
    state.warnings += [
        f"Worker {address} is outside the private network: others may read what is sent to it."
        for address in workers.unguarded
    ]
    state.notes += [
        f"The worker {device.name} lends {readable(device.free)}; it is {device.ping_s * 1e3:.1f} ms away."
        for device in workers.devices
    ]
    if not workers.devices:
        workers.close()
        return None
    return workers


def borrow_layers(
    assignment: LayerAssignment, workers: WorkerPool, state: LoadState
) -> tuple[DeviceLayers, RemoteLayers]:
    """The layers on workers, for llama.cpp, and what notices that a worker is lost."""
    borrowed = workers.borrow(lambda: state.abort.is_set)
    return DeviceLayers.of(assignment.used(borrowed)), RemoteLayers(
        lost=workers.lost, release=workers.close, setup_s=workers.sizing_s
    )
