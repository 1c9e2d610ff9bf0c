"""Graphics cards and other devices that failed while they computed, as this process has seen them.

A device that ran out of memory gets less of a model the next time. One that failed otherwise is lost: its
driver answers every further call with the same error, even those that free memory. So nothing that is there
is touched again, and the process leaves it alone from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.base.option import named
from edgespec.errors import BackendError, DeviceLostError, DeviceMemoryError
from edgespec.kernels.ggml import Address
from edgespec.kernels.ggml.buffer_types import name_of_device
from edgespec.llama.runtime.backend import LogLines, tells_of_memory
from edgespec.printable import one_line

_lost: set[str] = set()
_shortages = 0


def lost_devices() -> frozenset[str]:
    """ggml's names of the devices that are lost."""
    return frozenset(_lost)


class LossWatch:
    """Notices whether any of some devices is lost from now on.

    A worker that was lost may come back under the same name, and what is there then is freed as usual.
    """

    def __init__(self, devices: Sequence[Address]) -> None:
        self._names = {name_of_device(device) for device in devices} - _lost

    @property
    def lost(self) -> bool:
        """True if one of them has failed, in whatever it computed."""
        return not self._names.isdisjoint(_lost)


def shortages() -> int:
    """The number of times that a device has run out of memory while it computed."""
    return _shortages


def device_error(devices: Sequence[Address], said: str, log: LogLines) -> BackendError | DeviceMemoryError:
    """The error for a device of a model that has failed while it computed, which is remembered.

    Args:
        devices: those that hold layers of the model.
        said: what its backend said last.
        log: lines that were logged before.
    """
    global _shortages
    names = [name_of_device(device) for device in devices]
    subject = " or ".join(names)
    # What is said last is often no more than a line of ggml's sources; the cause is in the log then.
    cause = log.cause() if log.errors else one_line(said).rstrip(".")
    if tells_of_memory(said) or log.memory_ran_out:
        _shortages += 1
        return DeviceMemoryError(
            f"{subject} ran out of memory while it computed: {cause}.",
            f"Close programs that use the card, or lower {named('gpu_layers')} or {named('context')}.",
        )
    _lost.update(names)
    return DeviceLostError(
        f"{subject} failed while it computed: {cause}.",
        f"Continue without it: {named('gpu_layers', 0)}. If it fails again, update its driver and check "
        "its temperature.",
    )
