"""Other machines that hold layers of the target: connecting them, and giving them layers."""

from __future__ import annotations

from edgespec.loading.devices.spreading import Spread, usual_type
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.runtime.device_layers import DeviceLayers
from edgespec.models.llama.runtime.remote_layers import RemoteLayers
from edgespec.units import readable
from edgespec.workers.address import parse_addresses
from edgespec.workers.crew import Crew


def connect(files: ModelFiles, state: LoadState) -> Crew | None:
    """The workers that were named; None if there are none, or none that answers where that is allowed.

    Raises:
        BackendError, WorkerError: as Crew.
    """
    devices = state.config.devices
    if not devices.workers:
        return None
    crew = Crew(
        parse_addresses(",".join(devices.workers)),
        type_id=usual_type(files),
        n_threads=state.n_threads,
        leave_out_missing=devices.leave_out_missing,
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


def borrow_layers(spread: Spread, crew: Crew, state: LoadState) -> tuple[DeviceLayers, RemoteLayers]:
    """The layers on workers, for llama.cpp, and what notices that a worker is lost.

    Raises:
        WorkerError: one was lost meanwhile.
    """
    borrowed = crew.borrow(lambda: state.abort.is_set)
    return DeviceLayers.of(spread.used(borrowed)), RemoteLayers(
        lost=crew.lost, release=crew.close, setup_s=crew.sizing_s
    )
