"""The pool of expert slots: single experts of all layers, read when a pass needs them.

Which experts a layer needs is known only when its router has been computed, so a pass waits for those that
are not in memory. Several threads read them at once, in pieces. What is given up for them is decided by
fading counts over all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.expert_use import ExpertUse
from edgespec.kernels.ggml import Address
from edgespec.offload.layout import EXPERT_PIECE_BYTES, Read
from edgespec.offload.slot_filler import SlotFiller, SlotLoad
from edgespec.offload.store_reader import StoreReader

HALF_LIFE = 128.0  # passes after which a use counts half

_MAX_DOUBLINGS = 512.0  # of the weight of a new use, before all counts are scaled down


class FadingCounts:
    """Counts uses of numbered things (least frequently used, with aging).

    What was used recently (LRU) is a poorer guess: on a real router's choices, with a quarter, half and three
    quarters of the experts in memory, fading counts hit .73, .92 and .99 of the time, recency .63, .89 and
    .98. A fixed set of popular experts gains nothing over either: what is popular changes with the text.

    The weight of new uses grows instead of all counts shrinking, which comes to the same and is cheaper.

    Attributes:
        worth: (n,) float64, the count of each; only comparable with each other.
    """

    def __init__(self, n: int, half_life: float = HALF_LIFE) -> None:
        self.worth: NDArray[np.float64] = np.zeros(n)
        self._per_pass = 1 / half_life
        self._doublings = 0.0

    def next_pass(self) -> None:
        """Fade the counts by one pass."""
        self._doublings += self._per_pass
        if self._doublings > _MAX_DOUBLINGS:
            self.worth *= 2.0**-self._doublings
            self._doublings = 0.0

    def add(self, numbers: Sequence[int], shares: Sequence[float]) -> None:
        """Count uses in this pass.

        Args:
            numbers: what was used, each once.
            shares: for each, the share of the pass's rows that used it: so a long piece of a prompt, whose
                rows use nearly everything, counts no more than a single token.
        """
        weight = 2.0**self._doublings
        for number, share in zip(numbers, shares, strict=True):
            self.worth[number] += share * weight


Numbers = NDArray[np.intp]

_EMPTY = -1


class ExpertPool:
    """Decides which experts are in memory, and in which slots.

    Within the pool the experts of all layers are numbered consecutively. A token asks for a few of them at
    each of many layers, so what is done for each request is written in plain Python: for a few numbers it
    takes less time than NumPy's functions do.

    Args:
        layers: those whose experts are streamed.
        n_slots: at least as many as any layer has experts, or fewer if no pass needs so many of one.

    Attributes:
        slots: holds the experts, and reads them; loads are numbered like experts.
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
        self._slot_of = [_EMPTY] * len(self._experts)
        self._expert_in = np.full(self.n_slots, _EMPTY, np.intp)
        self._needed: list[int] = []  # by the layer that is being computed
        self._absent: list[int] = []  # of them, those that have no slot yet
        self._wanted: list[SlotLoad] = []  # for them
        self._ahead: set[int] = set()  # read ahead, and not needed yet
        self._loads: dict[int, SlotLoad] = {}
        self._reads: dict[int, tuple[Read, ...]] = {}  # of experts that have been read before
        self._hits = self._misses = self._read_bytes = 0
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
    def use(self) -> ExpertUse:
        """Hits and misses so far."""
        return ExpertUse(self._hits, self._misses, self._read_bytes)

    @property
    def address(self) -> Address:
        """The first slot."""
        return self.slots.address_of(0)

    def next_pass(self) -> None:
        self._counts.next_pass()

    def request(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        """Begin to read those of a layer's experts that are not in memory.

        All of them stay until another layer's are requested.

        Args:
            experts: distinct numbers within the layer.
            shares: of the pass's rows that need each of them.
        """
        first = self._first[layer]
        with self.slots.lock:
            needed = self._needed = [first + expert for expert in experts]
            self._counts.add(needed, shares)
            self._absent = self._without_slots(needed)
            self._count(needed, self._absent)
            self._wanted = [self._loads[n] for n in needed if n in self._loads] if self._loads else []
            self.slots.prioritize(self._wanted)
            if self._absent:
                self._begin_absent()

    def acquire(self, stop: Callable[[], bool]) -> list[int]:
        """The slots of the experts that were requested last, when all of them have been read.

        Args:
            stop: polled while waiting; ends the wait.

        Raises:
            DecodeAborted: `stop` said so.
        """
        if self._absent or self._wanted:
            self._wait(stop)
        return [self._slot_of[number] for number in self._needed]

    def _wait(self, stop: Callable[[], bool]) -> None:
        with self.slots.waiting():
            while self._absent:  # what is read ahead holds the slots that could be given up
                self.slots.wait(stop)
                self._begin_absent()
            while any(load.missing for load in self._wanted):
                self.slots.wait(stop)
            for load in self._wanted:
                if load.error is not None:
                    raise load.error

    def read_ahead(self, layer: int) -> None:
        """Begin to read all of a layer's experts, or the likeliest if there are not enough slots for all."""
        with self.slots.lock:
            absent = self._without_slots(range(self._first[layer], self._first[layer] + self._sizes[layer]))
            spare = self._spare_slots(len(absent))
            likeliest = sorted(absent, key=lambda number: -self._counts.worth[number])[: len(spare)]
            # In the file's order, so that neighbours are read at once.
            self._ahead.update(load.what for load in self._begin(sorted(likeliest), spare, low_priority=True))

    def close(self) -> None:
        """End the threads and free the memory."""
        self.slots.close()

    def _begin_absent(self) -> None:
        begun = self._begin(self._absent, self._spare_slots(len(self._absent)))
        self._wanted += begun
        self._absent = self._absent[len(begun) :]

    def _count(self, needed: list[int], absent: list[int]) -> None:
        ahead = self._ahead.intersection(needed) if self._ahead else ()
        self._ahead.difference_update(ahead)
        misses = len(absent) + len(ahead)
        self._hits += len(needed) - misses
        self._misses += misses
        self._read_bytes += sum(self._experts[n][0].n_bytes for n in (*absent, *ahead))

    def _begin(self, numbers: Iterable[int], spare: Numbers, *, low_priority: bool = False) -> list[SlotLoad]:
        """Begin to read as many of these experts as there are spare slots, in the given order."""
        begun = []
        for expert, slot in zip(numbers, spare.tolist(), strict=False):
            before = int(self._expert_in[slot])
            if before != _EMPTY:
                self._slot_of[before] = _EMPTY
                self._ahead.discard(before)
            self._slot_of[expert], self._expert_in[slot] = slot, expert
            load = self._loads[expert] = SlotLoad(expert, slot)
            self.slots.read(load, self._reads_of(expert), low_priority=low_priority)
            begun.append(load)
        return begun

    def _without_slots(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self._slot_of[number] == _EMPTY]

    def _reads_of(self, expert: int) -> tuple[Read, ...]:
        if expert not in self._reads:
            layer, number = self._experts[expert]
            self._reads[expert] = layer.reads(number)
        return self._reads[expert]

    def _spare_slots(self, n: int) -> Numbers:
        """Choose at most `n` slots: free ones, then those whose experts are worth least."""
        if n == 0:
            return np.zeros(0, np.intp)
        worth = np.where(self._expert_in == _EMPTY, -1.0, self._counts.worth[self._expert_in])
        kept = [self._slot_of[number] for number in self._needed]
        kept += [load.slot for load in self._loads.values()]
        worth[[slot for slot in kept if slot != _EMPTY]] = np.inf
        n = min(n, self.n_slots)
        least = np.argpartition(worth, n - 1)[:n]
        return least[np.isfinite(worth[least])]

    def _read_ended(self, load: SlotLoad) -> bool:
        if load.missing:
            return False
        del self._loads[load.what]
        if load.error is not None:
            self._slot_of[load.what] = self._expert_in[load.slot] = _EMPTY
            self._ahead.discard(load.what)
        return True
