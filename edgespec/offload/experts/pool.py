"""The pool of expert slots: single experts of all layers, read when a pass needs them.

Which experts a layer needs is known only when its router has been computed, so a pass waits for those that
are not in memory. Several threads read them at once, in pieces. What is given up for them is decided by
fading counts over all layers together.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.generation.expert_use import ExpertUse
from edgespec.kernels.ggml import Address, address_of_map
from edgespec.models.llama.runtime.abort import DecodeAborted
from edgespec.offload.experts.fading_counts import FadingCounts
from edgespec.offload.layout import EXPERT_PIECE_BYTES, ExpertRead
from edgespec.offload.read_meter import ReadMeter
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

Numbers = NDArray[np.intp]

_POLL_S = 0.05  # how often a wait checks whether it should end
_EMPTY = -1


class _Load:
    """An expert that is being read into a slot."""

    def __init__(self, expert: int, slot: int, reads: Sequence[ExpertRead]) -> None:
        self.expert = expert
        self.slot = slot
        self.reads = reads
        self.missing = len(reads)
        self.error: BaseException | None = None


class ExpertPool:
    """Slots, the threads that fill them, and what is in them.

    Within the pool the experts of all layers are numbered consecutively.

    Args:
        layers: those whose experts are streamed.
        n_slots: at least as many as any layer has experts, or fewer if no pass needs so many of one.

    Attributes:
        use: hits and misses so far.
        waited_s: total seconds that passes have waited for experts.
        meter: counts the reads.
    """

    def __init__(self, reader: StoreReader, layers: Iterable[int], *, n_slots: int, n_threads: int) -> None:
        self._reader = reader
        stored = [reader.store.experts[index] for index in sorted(layers)]
        self._experts = [(layer, expert) for layer in stored for expert in range(layer.n_experts)]
        self._first: dict[int, int] = {}
        for number, (layer, expert) in enumerate(self._experts):
            if expert == 0:
                self._first[layer.index] = number
        self._sizes = {layer.index: layer.n_experts for layer in stored}
        self.n_slots = min(n_slots, len(self._experts))
        self.slot_bytes = max(layer.n_bytes for layer in stored)
        self._memory = WeightMemory(self.n_slots * self.slot_bytes)
        self._counts = FadingCounts(len(self._experts))
        self._slot_of = np.full(len(self._experts), _EMPTY, np.int32)
        self._expert_in = np.full(self.n_slots, _EMPTY, np.intp)
        self._needed: Numbers = np.zeros(0, np.intp)  # by the layer that is being computed
        self._ahead: set[int] = set()  # read ahead, and not needed yet
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}
        self._jobs: deque[tuple[_Load, ExpertRead]] = deque()
        self._later: deque[tuple[_Load, ExpertRead]] = deque()  # after all others
        self._closing = False
        self.use = ExpertUse()
        self.waited_s = 0.0
        self.meter = ReadMeter()
        self._threads = [
            threading.Thread(target=self._work, name=f"edgespec-expert-reader-{n}", daemon=True)
            for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_bytes(self) -> int:
        """Bytes of all slots."""
        return self._memory.n_bytes

    @property
    def address(self) -> Address:
        """The first slot."""
        return self._memory.address

    @property
    def n_experts(self) -> int:
        """Experts of all layers."""
        return len(self._experts)

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
        start = time.perf_counter()
        with self._changed:
            needed = self._needed = self._first[layer] + experts.astype(np.intp)
            self._counts.add(needed, shares)
            absent = needed[self._slot_of[needed] == _EMPTY]
            self._count(needed, absent)
            wanted = [self._loads[n] for n in needed.tolist() if n in self._loads]
            self._hurry(wanted)
            try:
                while len(absent):
                    begun = self._begin(absent, self._jobs)
                    wanted += begun
                    absent = absent[len(begun) :]
                    if len(absent):  # what is read ahead holds the slots that could be given up
                        self._wait(stop)
                while any(load.missing for load in wanted):
                    self._wait(stop)
            finally:
                self.waited_s += time.perf_counter() - start
            for load in wanted:
                if load.error is not None:
                    raise load.error
            slots: NDArray[np.int32] = self._slot_of[needed]
            return slots

    def read_ahead(self, layer: int) -> None:
        """Begin to read all of a layer's experts, the likeliest first, as far as there are slots for them."""
        with self._changed:
            first = self._first[layer]
            numbers = np.arange(first, first + self._sizes[layer])
            absent = numbers[self._slot_of[numbers] == _EMPTY]
            likeliest = absent[np.argsort(-self._counts.worth[absent], kind="stable")]
            self._ahead.update(load.expert for load in self._begin(likeliest, self._later))

    def close(self) -> None:
        """End the threads and free the memory."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._later.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory.close()

    def _count(self, needed: Numbers, absent: Numbers) -> None:
        ahead = self._ahead.intersection(needed.tolist())
        self._ahead -= ahead
        misses = len(absent) + len(ahead)
        n_bytes = sum(self._experts[n][0].n_bytes for n in (*absent.tolist(), *ahead))
        self.use += ExpertUse(len(needed) - misses, misses, n_bytes)

    def _wait(self, stop: Callable[[], bool]) -> None:
        if stop():
            raise DecodeAborted
        self._changed.wait(_POLL_S)

    def _hurry(self, loads: Sequence[_Load]) -> None:
        """Read these before what is only read ahead."""
        if loads and self._later:
            wanted = {id(load) for load in loads}
            self._jobs.extend(job for job in self._later if id(job[0]) in wanted)
            self._later = deque(job for job in self._later if id(job[0]) not in wanted)

    def _begin(self, numbers: Numbers, jobs: deque[tuple[_Load, ExpertRead]]) -> list[_Load]:
        """Begin to read as many of these experts as there are slots for, in the given order."""
        begun = []
        for expert, slot in zip(numbers.tolist(), self._spare_slots(len(numbers)).tolist(), strict=False):
            before = int(self._expert_in[slot])
            if before != _EMPTY:
                self._slot_of[before] = _EMPTY
                self._ahead.discard(before)
            self._slot_of[expert], self._expert_in[slot] = slot, expert
            layer, number = self._experts[expert]
            load = self._loads[expert] = _Load(expert, slot, layer.reads(number))
            jobs.extend((load, read) for read in load.reads)
            begun.append(load)
        self._changed.notify_all()
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

    def _work(self) -> None:
        scratch = mmap.mmap(-1, EXPERT_PIECE_BYTES)  # takes memory when it is first written to
        while True:
            with self._changed:
                while not (self._jobs or self._later or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
                load, read = (self._jobs or self._later).popleft()
                self.meter.begun()
            error: BaseException | None = None
            try:
                self._read(read, load.slot * self.slot_bytes, scratch)
            except BaseException as caught:  # raised where the expert is needed
                error = caught
            with self._changed:
                self.meter.ended(read.piece.n_bytes)
                load.missing -= 1
                load.error = load.error or error
                if not load.missing:
                    self._finish(load)
        scratch.close()

    def _read(self, read: ExpertRead, slot: int, scratch: mmap.mmap) -> None:
        """Read a part of an expert into the slot that begins at byte `slot`."""
        piece = read.piece
        if read.direct:
            with self._memory.view(slot + piece.at, piece.n_bytes) as memory:
                self._reader.read(piece, memory)
            return
        with memoryview(scratch) as whole, whole[: piece.n_bytes] as memory:
            self._reader.read(piece, memory)
        to = self._memory.address + slot + piece.at + read.first
        ctypes.memmove(to, address_of_map(scratch) + read.first, read.last - read.first)

    def _finish(self, load: _Load) -> None:
        """An expert has been read, or failed to be."""
        del self._loads[load.expert]
        if load.error is not None:
            self._slot_of[load.expert] = self._expert_in[load.slot] = _EMPTY
        self._changed.notify_all()
