"""Slots for weights, and the threads that fill them from a store.

What is read into which slot, and when a slot may be filled anew, is for others to decide: the ring of layers
and the pool of experts.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter

from edgespec.errors import StreamError
from edgespec.kernels.ggml import Address
from edgespec.llama.runtime.abort import DecodeAborted
from edgespec.offload.layout import PIECE_BYTES, Read
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import WeightMemory

_POLL_S = 0.05  # how often a wait checks whether it should end


class ReadMeter:
    """Counts what several threads read. Its owner's lock must be held by whoever calls.

    Attributes:
        n_bytes: read so far.
        seconds: during which any read was under way.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self.seconds = 0.0
        self._under_way, self._since = 0, 0.0

    def begun(self) -> None:
        self._count(+1)

    def ended(self, n_bytes: int) -> None:
        self._count(-1)
        self.n_bytes += n_bytes

    def _count(self, change: int) -> None:
        now = perf_counter()
        if self._under_way:
            self.seconds += now - self._since
        self._under_way += change
        self._since = now


class SlotLoad:
    """Something that is being read into a slot.

    Attributes:
        what: it, in its owner's numbers.
        at: byte of the slot at which it begins.
        missing: its reads that have not ended.
        under_way: those of them that have begun.
        error: why one of them failed.
    """

    def __init__(self, what: int, slot: int, at: int = 0) -> None:
        self.what = what
        self.slot = slot
        self.at = at
        self.missing = self.under_way = 0
        self.error: BaseException | None = None


_Job = tuple[SlotLoad, Read]


class SlotFiller:
    """Equal slots, and the threads that read into them.

    Args:
        n_threads: for each disk.
        scratch_bytes: of the largest read whose bytes have to be moved to their place; 0 if there are none.
        on_ended: called whenever a read of a load has ended, with the lock held. Returns whether that may end
            a wait.
        new_memory: allocates the slots.

    Attributes:
        lock: guards everything, what its owner keeps included.
        waited_s: total seconds of waits.
        meter: counts the reads.
        disk_meters: count those of each disk.
    """

    def __init__(
        self,
        reader: StoreReader,
        *,
        n_slots: int,
        slot_bytes: int,
        n_threads: int,
        on_ended: Callable[[SlotLoad], bool],
        scratch_bytes: int = 0,
        new_memory: Callable[[int], WeightMemory] = WeightMemory,
    ) -> None:
        self._reader = reader
        self._on_ended = on_ended
        self._scratch_bytes = scratch_bytes
        self.slot_bytes = slot_bytes
        self._memory = new_memory(n_slots * slot_bytes)
        self.lock = threading.Lock()
        # Each disk has its own readers, which wait for reads: a slow disk does not hold up a fast one.
        n_disks = reader.store.n_disks
        self._queued = [threading.Condition(self.lock) for _ in range(n_disks)]
        self._arrived = threading.Condition(self.lock)  # a pass waits for weights
        self._jobs: list[deque[_Job]] = [deque() for _ in range(n_disks)]
        self._later: list[deque[_Job]] = [deque() for _ in range(n_disks)]  # after all others
        self._closing = False
        self._failure: BaseException | None = None  # has ended a thread, whose reads nobody ends
        self._n_threads = n_threads
        self.waited_s = 0.0
        self.meter = ReadMeter()
        self.disk_meters = [ReadMeter() for _ in range(n_disks)]
        self._threads = [
            threading.Thread(target=self._work, args=(n % n_disks,), name=f"edgespec-reader-{n}", daemon=True)
            for n in range(n_threads * n_disks)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise StreamError(
                f"Cannot start a thread to read weights: {error}.",
                "Raise the limits on processes and on address space, or free memory.",
            ) from error

    @property
    def n_bytes(self) -> int:
        return self._memory.n_bytes

    def address_of(self, slot: int) -> Address:
        return self._memory.address + slot * self.slot_bytes

    def address_of_load(self, load: SlotLoad) -> Address:
        """Return the address of what is read into a slot."""
        return self._memory.address + self._place(load)

    def _place(self, load: SlotLoad) -> int:
        return load.slot * self.slot_bytes + load.at

    def read(self, load: SlotLoad, reads: Iterable[Read], *, low_priority: bool = False) -> None:
        """Queue the reads of a load; the lock must be held, as for all that follows.

        Args:
            low_priority: only when nothing else is to be read.
        """
        jobs = [(load, read) for read in reads]
        load.missing += len(jobs)
        self._enqueue(jobs, self._later if low_priority else self._jobs)

    def _enqueue(self, jobs: Iterable[_Job], queues: Sequence[deque[_Job]]) -> None:
        for job in jobs:
            disk = self._reader.store.disk_of(job[1].piece)
            queues[disk].append(job)
            self._queued[disk].notify()

    def prioritize(self, loads: Collection[SlotLoad]) -> None:
        """Read these before what is only to be read later."""
        if not (loads and any(self._later)):
            return
        wanted = {id(load) for load in loads}
        hurried = [job for queue in self._later for job in queue if id(job[0]) in wanted]
        self._later = [deque(job for job in queue if id(job[0]) not in wanted) for queue in self._later]
        self._enqueue(hurried, self._jobs)

    def drop(self, load: SlotLoad) -> None:
        """Do not begin any more reads of a load."""
        self._jobs = [deque(job for job in queue if job[0] is not load) for queue in self._jobs]
        self._later = [deque(job for job in queue if job[0] is not load) for queue in self._later]
        load.missing = load.under_way

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Hold the lock, and count the time as spent waiting."""
        start = perf_counter()
        with self.lock:
            try:
                yield
            finally:
                self.waited_s += perf_counter() - start

    def wait(self, stop: Callable[[], bool]) -> None:
        """Wait until something may have arrived, or for a moment.

        Raises:
            StreamError: a thread that reads has failed, so what is waited for may never arrive.
            DecodeAborted: `stop` says so.
        """
        if self._failure is not None:
            raise StreamError(
                f"A thread that reads weights has failed: {type(self._failure).__name__}: {self._failure}.",
                "Load the model again.",
            ) from self._failure
        if stop():
            raise DecodeAborted
        self._arrived.wait(_POLL_S)

    def close(self) -> None:
        """End the threads and free the memory; the lock must not be held."""
        with self.lock:
            self._closing = True
            for queue in (*self._jobs, *self._later):
                queue.clear()
            for queued in self._queued:
                queued.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._memory.close()

    def _work(self, disk: int) -> None:
        """Read one job after the other until `close`; what ends the thread before that ends every wait."""
        try:
            with ExitStack() as stack:
                scratch = _Scratch(self._scratch_bytes)
                stack.callback(scratch.close)
                while jobs := self._take(disk):
                    error: BaseException | None = None
                    try:
                        self._read(jobs, scratch)
                    except BaseException as caught:  # raised where the weights are needed
                        error = caught
                    n_bytes = sum(read.piece.n_bytes for _, read in jobs)
                    with self.lock:
                        self.meter.ended(n_bytes)
                        self.disk_meters[disk].ended(n_bytes)
                        self._end(jobs, error)
        except BaseException as error:
            with self.lock:
                self._failure = error
                self._arrived.notify_all()

    def _take(self, disk: int) -> list[_Job]:
        """Wait for jobs of a disk, and begin the next ones; none when the threads are to end."""
        with self.lock:
            while not (self._jobs[disk] or self._later[disk] or self._closing):
                self._queued[disk].wait()
            if self._closing:
                return []
            jobs = self._next_jobs(self._jobs[disk] or self._later[disk])
            for load, _ in jobs:
                load.under_way += 1
            self.meter.begun()
            self.disk_meters[disk].begun()
            return jobs

    def _next_jobs(self, queue: deque[_Job]) -> list[_Job]:
        """Take the first job, and those that continue it in the file: a long read is quicker than several.

        Where there are few jobs, they are left to the other threads.
        """
        jobs = [queue.popleft()]
        n_bytes, most = jobs[0][1].piece.n_bytes, len(queue) // self._n_threads
        while len(jobs) <= most and jobs[-1][1].continued_by(queue[0][1]):
            n_bytes += queue[0][1].piece.n_bytes
            if n_bytes > PIECE_BYTES:
                break
            jobs.append(queue.popleft())
        return jobs

    def _end(self, jobs: Iterable[_Job], error: BaseException | None) -> None:
        for load, _ in jobs:
            load.under_way -= 1
            load.missing -= 1
            load.error = load.error or error
            if self._on_ended(load):
                self._arrived.notify_all()

    def _read(self, jobs: list[_Job], scratch: _Scratch) -> None:
        """Read jobs that continue one another into their slots."""
        pieces = [read.piece for _, read in jobs]
        load, first = jobs[0]
        if first.direct:
            with ExitStack() as views:
                places = [self._place(load) + read.piece.at for load, read in jobs]
                memories = [
                    views.enter_context(self._memory.view(place, piece.n_bytes))
                    for place, piece in zip(places, pieces, strict=True)
                ]
                self._reader.read(pieces, memories)
            return
        memory = scratch.memory
        with memory.view(0, pieces[0].n_bytes) as view:
            self._reader.read(pieces, [view])
        to = self._memory.address + self._place(load) + first.piece.at + first.first
        ctypes.memmove(to, memory.address + first.first, first.last - first.first)


class _Scratch:
    """Memory of one thread for reads whose bytes have to be moved, allocated when it is first needed."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._memory: WeightMemory | None = None

    @property
    def memory(self) -> WeightMemory:
        """The memory.

        Raises:
            MemoryLimitError: the system refuses it; the next read tries again.
        """
        if self._memory is None:
            self._memory = WeightMemory(self._n_bytes)
        return self._memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
