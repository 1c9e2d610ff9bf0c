"""Graphics cards, and other devices of this machine that may hold layers: their memory and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.base.option import named
from edgespec.costs.curves import Curve
from edgespec.errors import BackendError
from edgespec.kernels.ggml import Address, rpc
from edgespec.kernels.ggml.buffer_types import device_named
from edgespec.profiles.figures import DeviceProfile


@dataclass(frozen=True)
class Card:
    """A device of this machine that may hold layers, such as a graphics card."""

    # ggml's, such as "CUDA0"
    name: str
    description: str
    # bytes of its memory
    free: int
    total: int
    shared: bool  # whether that is the memory of the processor
    profile: DeviceProfile  # what was measured
    # bytes at most for the target's layers, after a load has run out of memory; None for any
    limit: int | None = None

    @property
    def key(self) -> str:
        """The key under which measurements of the device are stored."""
        return f"{self.name} {self.description}"

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds for a byte of weights, for each of kernels.report.ROWS."""
        return self.profile.seconds

    @property
    def transfer(self) -> Curve:
        """Seconds in which so many bytes get there and back."""
        return self.profile.transfer

    @property
    def ping_s(self) -> float:
        """Seconds of the shortest transfer there and back."""
        return self.transfer.seconds[0]

    @property
    def pointer(self) -> Address:
        """ggml's device.

        Raises:
            BackendError: it is gone.
        """
        pointer = device_named(self.name)
        if pointer is None:
            raise BackendError(f"The device {self.name} is gone.", f"Leave out {named('gpu_layers')}.")
        return pointer

    def now(self) -> Card:
        """The card with the memory that is free now; raises as `pointer`."""
        return replace(self, free=rpc.describe(self.pointer).free)


@dataclass(frozen=True)
class Cards:
    """Devices of this machine."""

    devices: tuple[Card, ...]  # in ggml's order, or in that of --device
    # what the processor takes for a byte of weights as they are in files, for each of kernels.report.ROWS
    own_seconds: tuple[float, ...]
    type_id: int  # ggml's number of the quantization that was measured
    remote: bool = False

    @classmethod
    def of(cls, cards: Sequence[Card], type_id: int) -> Cards:
        """Cards that were measured with weights of a type."""
        return cls(tuple(cards), cards[0].profile.own_seconds, type_id)
