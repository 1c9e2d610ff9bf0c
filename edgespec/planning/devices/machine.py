"""The machine that a plan is for, read once: free memory, and devices with theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.files.positioned import can_read_at_offsets
from edgespec.kernels import ggml
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.layouts import own_in_use
from edgespec.kernels.native.build import build_once
from edgespec.kernels.watch import can_watch
from edgespec.llama.runtime.backend import start_backend
from edgespec.machine.cores import default_threads
from edgespec.machine.memory import FreeMemory
from edgespec.planning.devices.assignment import LayerDevices
from edgespec.planning.devices.card_placement import CardPlacement
from edgespec.planning.devices.cards import Cards


@dataclass(frozen=True)
class MachineSnapshot:
    """The machine that a plan is for, read once."""

    free: FreeMemory  # memory that is free
    n_threads: int  # CPU threads to compute with
    # devices of this machine that may hold layers, with their free memory; None if there are none
    cards: Cards | None = None
    # other machines that may hold layers, with what they lend; None if there are none
    workers: LayerDevices | None = None
    own_kernels: bool = False  # whether EdgeSpec's own kernels are in use
    no_streaming: str = ""  # why weights cannot be streamed here; empty if they can

    @classmethod
    def read(
        cls, n_threads: int | None = None, cards: Cards | None = None, workers: LayerDevices | None = None
    ) -> MachineSnapshot:
        """Read this machine's state, after devices were opened, which takes some memory."""
        try:
            check_supported()
            no_streaming = ""
        except UnsupportedBuild as error:
            no_streaming = str(error)
        return cls(
            FreeMemory.read(), n_threads or default_threads(), cards, workers, own_in_use(), no_streaming
        )

    def with_less_on_cards(self, placed: CardPlacement) -> MachineSnapshot:
        """This machine as it is now, after a load with this placement has run out of a card's memory.

        Raises:
            BackendError: a card is gone.
        """
        if self.cards is None:
            return self
        now = replace(self.cards, devices=tuple(card.now() for card in self.cards.devices))
        return replace(self, cards=placed.with_less(now))

    @property
    def lent_bytes(self) -> int:
        """Bytes of memory that workers lend."""
        return 0 if self.workers is None else sum(device.free for device in self.workers.devices)


def check_supported() -> None:
    """Make sure that weights can be streamed on this system with this llama.cpp build.

    Raises:
        UnsupportedBuild: they cannot; the text says why.
    """
    if not can_read_at_offsets():
        raise UnsupportedBuild("this system lacks direct reads")
    build_once()
    if not can_watch():
        raise UnsupportedBuild("EdgeSpec's own library was not compiled")
    start_backend()
    ggml.check()
