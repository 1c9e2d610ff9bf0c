"""The devices of this machine that can hold layers, such as graphics cards: do they work, and how fast?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgespec.base.progress import Progress
from edgespec.config import DevicesConfig
from edgespec.errors import InconclusiveTrial

if TYPE_CHECKING:
    from edgespec.llama.build import Build
    from edgespec.profiles.store import ProfileStore

_Q4_K = 12  # ggml's number of a quantization that many models have


@dataclass(frozen=True)
class DeviceCheck:
    """The outcome of trying a device."""

    name: str  # for --device
    description: str
    free: int  # bytes of its memory
    total: int
    measured: str = ""  # what it is and how fast, in sentences
    problem: str = ""  # how trying it ended; empty if it works
    untried: str = ""  # why it could not be tried; empty if it was
    faster: bool = False  # products take less time there than on the processor

    @property
    def title(self) -> str:
        """Its name, and what it is."""
        return f"{self.name} ({self.description})" if self.description else self.name

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts."""
        return asdict(self)


def examine_devices(build: Build, store: ProfileStore, on_progress: Progress) -> tuple[DeviceCheck, ...]:
    """Try and measure every device, in a child process; what was measured before is not measured again."""
    if not build.gpus:
        return ()
    from edgespec.kernels.device_speed import DeviceFailed
    from edgespec.machine.cores import default_threads
    from edgespec.planning.devices.finding import PlacementRequest, describe, measured

    request = PlacementRequest(DevicesConfig(), default_threads(), store, on_progress)
    found = []
    for device in build.gpus:
        about = (device.name, device.description, device.free, device.total)
        try:
            card = measured(device, _Q4_K, request)
        except DeviceFailed as error:
            found.append(DeviceCheck(*about, problem=str(error)))
        except InconclusiveTrial as error:
            found.append(DeviceCheck(*about, untried=error.reason))
        else:
            faster = card.seconds[-1] < card.profile.own_seconds[-1]
            placed = "placed automatically" if faster else "slower than the processor: --gpu-layers places"
            text = f"{describe(card)} Layers are {placed}."
            found.append(DeviceCheck(*about, text, faster=faster))
    return tuple(found)
