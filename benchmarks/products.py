"""Single products with EdgeSpec's own kernels: milliseconds, GB/s of weights for one row, GOP/s for more.

    python -m benchmarks.products [--types Q4_K Q6_K ...] [--shape 1536 8960] [--rows 1 8 32 64] [--threads 2]

Copies of the weights take turns, so that they come from memory and not from a cache. Printed are best times,
without the quantization of the activations, for every instruction set of the processor, and how fast the
threads read memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from benchmarks.harness import parser_of
from edgespec.kernels.native.build import build
from edgespec.machine.cores import usable_cores

_COPIES = 300 << 20  # bytes of weights that take turns
_PANEL = 16
_ALIGNMENT = 64


def main() -> None:
    """Measure, and print a line for each type and instruction set."""
    parser = parser_of(__doc__)
    parser.add_argument("--types", nargs="+", default=["Q4_K", "Q6_K", "Q4_0", "Q8_0"])
    parser.add_argument("--shape", type=int, nargs=2, default=[1536, 8960], metavar=("VALUES", "ROWS"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    kernels = _Kernels()
    k, n = options.shape
    rate = _COPIES / _best(_reading(), options.threads, options.seconds) / 1e9
    print(f"{n} rows of {k} weights, {options.threads} threads, memory read at {rate:.1f} GB/s")
    print(f"{'':20}" + "".join(f"{rows:>16}" for rows in options.rows))
    for name in options.types:
        for isa in kernels.isas():
            line = f"{name:7}{kernels.name(isa):13}"
            for rows in options.rows:
                share, n_bytes = kernels.product(GGMLQuantizationType[name], isa, k, n, rows)
                seconds = _best(share, options.threads, options.seconds)
                figure = (
                    f"{n_bytes / seconds / 1e9:.1f} GB/s"
                    if rows == 1
                    else f"{2e-9 * k * n * rows / seconds:.0f}"
                )
                line += f"{1e3 * seconds:8.3f}{figure:>8}"
            print(line, flush=True)


class _Kernels:
    def __init__(self) -> None:
        self._f = ctypes.CDLL(str(build()))
        self._f.edgespec_packed_bytes.restype = ctypes.c_size_t
        self._f.edgespec_activation_bytes.restype = ctypes.c_size_t
        self._f.edgespec_isa_name.restype = ctypes.c_char_p

    def isas(self) -> list[int]:
        return [isa for isa in range(16) if self._f.edgespec_isa_usable(isa)]

    def name(self, isa: int) -> str:
        return str(self._f.edgespec_isa_name(isa).decode())

    def product(
        self, kind: GGMLQuantizationType, isa: int, k: int, n: int, rows: int
    ) -> tuple[Callable[[int, int, int], None], int]:
        """A function that computes a thread's share of a product, and the bytes of the packed weights."""
        number, long = int(kind), ctypes.c_int64
        n_bytes = self._f.edgespec_packed_bytes(number, long(k), long(n))
        if not n_bytes:
            raise SystemExit(f"there are no kernels for {kind.name}")
        # Zeros are as fast as other weights, and need no knowledge of blocks.
        weights = [_aligned(n_bytes) for _ in range(max(2, _COPIES // n_bytes))]
        activation_kind = self._f.edgespec_activation_kind(number)
        activations = _aligned(self._f.edgespec_activation_bytes(activation_kind, long(k), long(rows)))
        x = np.random.default_rng(0).normal(size=(rows, k)).astype(np.float32)
        self._f.edgespec_quantize(
            isa, activation_kind, _at(x), long(k), long(k), long(rows), long(0), long(rows), _at(activations)
        )
        out = np.empty((rows, n), np.float32)
        panels = -(-n // _PANEL)

        def share(turn: int, thread: int, n_threads: int) -> None:
            first, end = (panels * part // n_threads for part in (thread, thread + 1))
            self._f.edgespec_multiply(
                isa, number, _at(weights[turn % len(weights)]), long(k), long(n), long(first), long(end),
                _at(activations), long(rows), _at(out), long(n), None,
            )  # fmt: skip

        return share, n_bytes


def _reading() -> Callable[[int, int, int], None]:
    """A function that reads a thread's share of as many bytes as take turns."""
    memory = _aligned(_COPIES)
    search = ctypes.CDLL(None).memchr
    search.restype = ctypes.c_void_p

    def share(_turn: int, thread: int, n_threads: int) -> None:
        first, end = (len(memory) * part // n_threads for part in (thread, thread + 1))
        search(_at(memory[first:end]), 1, ctypes.c_size_t(end - first))  # there is none

    return share


def _best(share: Callable[[int, int, int], None], n_threads: int, seconds: float) -> float:
    """The best time in which all threads do their shares."""
    taken: list[list[float]] = [[] for _ in range(n_threads)]
    barrier = Barrier(n_threads)
    end = time.perf_counter() + seconds
    going = [True]

    def work(thread: int) -> None:
        for turn in range(1_000_000):
            barrier.wait()
            if not going[0]:
                return
            begun = time.perf_counter()
            share(turn, thread, n_threads)
            taken[thread].append(time.perf_counter() - begun)
            barrier.wait()
            if thread == 0:
                going[0] = turn < 2 or time.perf_counter() < end

    threads = [Thread(target=work, args=(thread,)) for thread in range(1, n_threads)]
    for each in threads:
        each.start()
    work(0)
    for each in threads:
        each.join()
    best: float = min(max(turn) for turn in zip(*taken, strict=True))
    return best


def _aligned(n_bytes: int) -> np.ndarray[Any, Any]:
    """Bytes that are written, so that each copy has memory of its own."""
    whole = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    whole[:] = 0
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + n_bytes]


def _at(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


if __name__ == "__main__":
    main()
