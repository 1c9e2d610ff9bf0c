"""Throughput of disk and memory."""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from edgespec.base.progress import Progress
from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK, drop_cached
from edgespec.offload.layout import N_READERS, PIECE_BYTES
from edgespec.offload.weight_memory import WeightMemory
from edgespec.profiles.store import DiskProfile

_BLOCKS = (1 << 20, 4 << 20, 16 << 20)
_THREADS = (1, 2, 4)
_COPIED = 128 << 20
_TRIALS = 0.25  # of the time, to try block sizes and threads; and the same for buffered reads


def measure_reading(path: Path, seconds: float, on_progress: Progress) -> DiskProfile:
    """Measure direct reads as passes make them, and buffered reads of uncached data.

    Which block size and number of threads is the fastest is found as well. A disk may read for a moment, or
    what was read just before, much faster than it reads for long. So every measurement reads on in the file,
    and the speed of direct reads is that of the second half of a longer one.

    Raises:
        StreamError: the file cannot be read.
    """
    what = "Measuring the disk"
    settings = [(block, threads) for block in _BLOCKS for threads in _THREADS]
    share = _TRIALS * seconds / len(settings)
    direct, best, how, place = 0.0, 0.0, settings[0], 0
    try:
        with closing(FileReader(path, direct=True)) as reader:
            for number, (block, threads) in enumerate(settings):
                on_progress(what, number * share / seconds)
                speed, place = _speed(reader, block, threads, share, start=place)
                if speed > best:
                    best, how = speed, (block, threads)
            on_progress(what, _TRIALS)
            for _ in range(2):
                direct, place = _speed(
                    reader, PIECE_BYTES, N_READERS, (1 - 2 * _TRIALS) * seconds / 2, start=place
                )
    except StreamError:
        direct = 0.0  # this file system does not support direct reads
    on_progress(what, 1 - _TRIALS)
    forget_cached(path)
    with closing(FileReader(path, direct=False)) as reader:
        buffered, _ = _speed(reader, PIECE_BYTES, N_READERS, _TRIALS * seconds, start=place)
    return DiskProfile(direct, buffered, *how)


def sequential_speed(path: Path, *, max_bytes: int) -> tuple[float, bool]:
    """Bytes per second of reading a file once from its beginning, two blocks at a time.

    Returns:
        The speed, and whether reads bypassed the page cache, as they do wherever that is possible.

    Raises:
        StreamError: the file cannot be read.
    """
    block = _BLOCKS[-1]
    with closing(FileReader(path)) as reader:
        blocks = -(-min(reader.n_bytes, max_bytes) // block)
        return _speed(reader, block, 2, math.inf, blocks)[0], reader.direct


def read_speed(path: Path, *, max_bytes: int = 256 << 20, seconds: float = 1.0) -> float | None:
    """A quick estimate of bytes per second of direct reads; None if they fail, or the file is too small.

    It is accurate enough to tell a slow disk from a fast one.
    """
    try:
        with closing(FileReader(path, direct=True)) as reader:
            max_bytes = min(max_bytes, reader.n_bytes)
            if max_bytes < _BLOCKS[1]:
                return None
            return _speed(reader, _BLOCKS[1], _THREADS[-1], seconds, max_bytes // _BLOCKS[1])[0]
    except StreamError:
        return None


def memory_bandwidth(threads: int, rounds: int = 5) -> float:
    """Bytes per second that all threads together read and write while copying; a median over rounds."""
    n_bytes = _COPIED // threads
    sources = [np.ones(n_bytes // 8) for _ in range(threads)]
    targets = [np.zeros(n_bytes // 8) for _ in range(threads)]
    speeds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begun = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            speeds.append(2 * threads * n_bytes / (time.perf_counter() - begun))
    return statistics.median(speeds)


def _speed(
    reader: FileReader,
    block: int,
    threads: int,
    seconds: float,
    max_blocks: int | None = None,
    *,
    start: int = 0,
) -> tuple[float, int]:
    """Bytes per second while this many threads read block after block, starting over at the end of the file.

    They read into huge pages, as streaming does: the kernel pins every page that a direct read goes to, and
    for small pages that takes longer than a fast disk needs for the read.

    Args:
        start: byte to begin near.

    Returns:
        The speed, and where a further measurement may begin.
    """
    whole = max(reader.n_bytes // block, 1)
    lock = threading.Lock()
    first = start // block
    state = {"next": first, "bytes": 0}
    begun = time.perf_counter()

    def read(memory: memoryview) -> None:
        with memory:
            while time.perf_counter() - begun < seconds:
                with lock:
                    if max_blocks is not None and state["next"] - first >= max_blocks:
                        return
                    place = state["next"] % whole
                    state["next"] += 1
                size = min(block, -(-(reader.n_bytes - place * block) // BLOCK) * BLOCK)
                with memory[:size] as part:
                    n = reader.read_into([part], place * block)
                with lock:
                    state["bytes"] += n

    with closing(WeightMemory(threads * block)) as area, ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(read, area.view(number * block, block)) for number in range(threads)]:
            job.result()
    return state["bytes"] / (time.perf_counter() - begun), state["next"] * block % max(reader.n_bytes, 1)


def forget_cached(path: Path) -> None:
    """Ask the system to drop the file from the page cache, where possible; mapped pages stay."""
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux":
            os.fsync(file.fileno())  # pages that are not written yet would stay
        drop_cached(file.fileno())
