"""The pool of expert slots: single experts of all layers, read when a pass needs them.

Which experts a layer needs is known only when its router has been computed, so a pass waits for those that
are not in memory. Several threads read them at once, in pieces. What is given up for them is decided by
fading counts over all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.expert_use import ExpertUse
from edgespec.kernels.ggml import Address
from edgespec.offload.experts.fading_counts import FadingCounts
from edgespec.offload.layout import EXPERT_PIECE_BYTES
from edgespec.offload.slot_filler import Load, SlotFiller
from edgespec.offload.store_reader import StoreReader

Numbers = NDArray[np.intp]

_EMPTY = -1


class ExpertPool:
    """Decides which experts are in memory, and in which slots.

    Within the pool the experts of all layers are numbered consecutively.

    Args:
        layers: those whose experts are streamed.
        n_slots: at least as many as any layer has experts, or fewer if no pass needs so many of one.

    Attributes:
        slots: holds the experts, and reads them; loads are numbered like experts.
        use: hits and misses so far.
    """

    def __init__(self, reader: StoreReader, layers: Iterable[int], *, n_slots: int, n_threads: int) -> None:
        stored = [reader.store.experts[index] for index in sorted(layers)]
        self._experts = [(layer, expert) for layer in stored for expert in range(layer.n_experts)]
        self._first: dict[int, int] = {}
        for number, (layer, expert) in enumerate(self._experts):
            if expert == 0:
                self._first[layer.index] = number
        self._sizes = {layer.index: layer.n_experts for layer in stored}
        self.n_slots = min(n_slots, len(self._experts))
        self._counts = FadingCounts(len(self._experts))
        self._slot_of = np.full(len(self._experts), _EMPTY, np.int32)
        self._expert_in = np.full(self.n_slots, _EMPTY, np.intp)
        self._needed: Numbers = np.zeros(0, np.intp)  # by the layer that is being computed
        self._ahead: set[int] = set()  # read ahead, and not needed yet
        self._loads: dict[int, Load] = {}
        self.use = ExpertUse()
        self.slots = SlotFiller(
            reader,
            n_slots=self.n_slots,
            slot_bytes=max(layer.n_bytes for layer in stored),
            n_threads=n_threads,
            on_ended=self._read_ended,
            scratch_bytes=EXPERT_PIECE_BYTES,
        )

    @property
    def n_experts(self) -> int:
        """Experts of all layers."""
        return len(self._experts)

    @property
    def address(self) -> Address:
        """The first slot."""
        return self.slots.address_of(0)

    def next_pass(self) -> None:
        """A pass begins."""
        self._counts.next_pass()

    def take(
        self, layer: int, experts: Numbers, shares: NDArray[np.float64], stop: Callable[[], bool]
    ) -> NDArray[np.int32]:
        """The slots of some experts of a layer, when all of them have been read.

        They stay there until another layer's are taken.

        Args:
            experts: distinct numbers within the layer.
            shares: of the pass's rows that need each of them.
            stop: polled while waiting; ends the wait.

        Raises:
            StreamError: one could not be read. The next try reads it anew.
            DecodeAborted: `stop` said so.
        """
        with self.slots.waiting():
            needed = self._needed = self._first[layer] + experts.astype(np.intp)
            self._counts.add(needed, shares)
            absent = needed[self._slot_of[needed] == _EMPTY]
            self._count(needed, absent)
            wanted = [self._loads[n] for n in needed.tolist() if n in self._loads]
            self.slots.hurry(wanted)
            while len(absent):
                begun = self._begin(absent)
                wanted += begun
                absent = absent[len(begun) :]
                if len(absent):  # what is read ahead holds the slots that could be given up
                    self.slots.wait(stop)
            while any(load.missing for load in wanted):
                self.slots.wait(stop)
            for load in wanted:
                if load.error is not None:
                    raise load.error
            slots: NDArray[np.int32] = self._slot_of[needed]
            return slots

    def read_ahead(self, layer: int) -> None:
        """Begin to read all of a layer's experts, the likeliest first, as far as there are slots for them."""
        with self.slots.lock:
            first = self._first[layer]
            numbers = np.arange(first, first + self._sizes[layer])
            absent = numbers[self._slot_of[numbers] == _EMPTY]
            likeliest = absent[np.argsort(-self._counts.worth[absent], kind="stable")]
            self._ahead.update(load.what for load in self._begin(likeliest, later=True))

    def close(self) -> None:
        """End the threads and free the memory."""
        self.slots.close()

    def _count(self, needed: Numbers, absent: Numbers) -> None:
        ahead = self._ahead.intersection(needed.tolist())
        self._ahead -= ahead
        misses = len(absent) + len(ahead)
        n_bytes = sum(self._experts[n][0].n_bytes for n in (*absent.tolist(), *ahead))
        self.use += ExpertUse(len(needed) - misses, misses, n_bytes)

    def _begin(self, numbers: Numbers, *, later: bool = False) -> list[Load]:
        """Begin to read as many of these experts as there are slots for, in the given order."""
        begun = []
        for expert, slot in zip(numbers.tolist(), self._spare_slots(len(numbers)).tolist(), strict=False):
            before = int(self._expert_in[slot])
            if before != _EMPTY:
                self._slot_of[before] = _EMPTY
                self._ahead.discard(before)
            self._slot_of[expert], self._expert_in[slot] = slot, expert
            layer, number = self._experts[expert]
            load = self._loads[expert] = Load(expert, slot)
            self.slots.read(load, layer.reads(number), later=later)
            begun.append(load)
        return begun

    def _spare_slots(self, n: int) -> Numbers:
        """At most `n` slots: free ones, then those whose experts are worth least."""
        if n == 0:
            return np.zeros(0, np.intp)
        worth = np.where(self._expert_in == _EMPTY, -1.0, self._counts.worth[self._expert_in])
        held = self._slot_of[self._needed]
        worth[held[held != _EMPTY]] = np.inf
        worth[[load.slot for load in self._loads.values()]] = np.inf
        n = min(n, self.n_slots)
        least = np.argpartition(worth, n - 1)[:n]
        return least[np.isfinite(worth[least])]

    def _read_ended(self, load: Load) -> bool:
        if load.missing:
            return False
        del self._loads[load.what]
        if load.error is not None:
            self._slot_of[load.what] = self._expert_in[load.slot] = _EMPTY
        return True
