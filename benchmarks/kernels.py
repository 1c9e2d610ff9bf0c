"""Whole passes of a model with EdgeSpec's own kernels and with llama.cpp's, by rows.

    python -m benchmarks.kernels [--model FILE] [--rows 1 2 4 8 16 32 64] [--rounds 5] [--layouts ...]

Every row's logits are wanted. Each layout has a process of its own, in which the model stays loaded; the
processes take turns pass by pass, so that what else the machine does falls on all alike. Printed are medians
in milliseconds, and how many times as fast own kernels are as the fastest of llama.cpp's. Own kernels
are measured for every instruction set that the processor has.

Beside the table, each layout's reading of weights in a pass of the fewest rows is compared with the
bandwidth of memory: the model's bytes over the pass's time, and its share of what all threads read per
second. Passes of the most rows are compared with the most 8-bit multiply-adds per second that each
instruction set computes in registers (benchmarks/int8_peak.cpp; needs a C++ compiler).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.harness import parser_of
from edgespec.kernels.layouts import available_layouts
from edgespec.kernels.native import build, library
from edgespec.kernels.report_store import ensure_report, layouts_in_use
from edgespec.kernels.setting import OWN, PLAIN, VARIABLE, setting_for, setting_of
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.machine.cores import usable_cores
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog

ROWS = (1, 2, 4, 8, 16, 32, 64)
SETS = {  # the file of EdgeSpec's own kernels for each instruction set
    "avx2": "avx2.cpp",
    "avx2-vnni": "avx2_vnni.cpp",
    "avx512-vnni": "avx512_vnni.cpp",
    "amx": "amx.cpp",
    "neon-dotprod": "neon.cpp",
    "neon-i8mm": "neon_i8mm.cpp",
}
_WORKER = "--serve"
_SWEPT = 512 << 20  # bytes
_ROWS = 512  # of a pass, at most


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="default: the small model that the set-up brings along")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--text", type=int, default=128, help="tokens before the rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--layouts", nargs="*", help="values of EDGESPEC_KERNELS; default: all of this processor"
    )
    parser.add_argument(_WORKER, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.model or catalog.find(catalog.DEFAULT, fetch=False)
    if options.serve:
        serve(path, options.text, max(options.rows), options.threads)
        return
    settings = options.layouts or _settings()
    print(f"{path.name}, {options.threads} threads, {options.text} tokens before the rows; milliseconds")
    found = measure(
        settings, [str(path), str(options.text), str(options.threads)], options.rows, options.rounds
    )
    print(f"{'':24}" + "".join(f"{rows:>9}" for rows in options.rows))
    for setting in settings:
        print(f"{setting:24}" + "".join(f"{1e3 * found[setting, rows]:9.1f}" for rows in options.rows))
    print_bandwidth({s: found[s, min(options.rows)] for s in settings}, path, options.threads)
    most = max(options.rows)
    print_peaks({s: found[s, most] for s in settings}, most, path, options.threads)
    own = [setting for setting in settings if setting.startswith(str(setting_of(OWN)))]
    others = [setting for setting in settings if setting not in own]
    if own and others:
        ratios = [
            min(found[setting, rows] for setting in others) / min(found[setting, rows] for setting in own)
            for rows in options.rows
        ]
        print(f"{'own, times as fast':24}" + "".join(f"{ratio:9.2f}" for ratio in ratios))


def print_bandwidth(seconds: dict[str, float], path: Path, n_threads: int) -> None:
    """Print how much of the bandwidth of memory passes of the fewest rows reach.

    Args:
        seconds: of such a pass, by setting.
    """
    bandwidth = read_bandwidth(n_threads)
    n_bytes = ModelFiles.of(read_header(path)).tensor_bytes
    print(f"memory: {bandwidth / 1e9:.1f} GB/s are read by {n_threads} threads; of that, passes reach")
    for setting, taken in seconds.items():
        speed = n_bytes / taken
        print(f"{setting:24}{speed / 1e9:9.1f} GB/s {100 * speed / bandwidth:5.0f} %")


def read_bandwidth(n_threads: int, rounds: int = 7) -> float:
    """Bytes of memory that threads read per second: the best of several sweeps over more than caches hold."""
    parts = [np.ones(_SWEPT // 8 // n_threads, dtype=np.int64) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:  # NumPy lets go of the lock while it reduces
        for _ in range(rounds):
            begun = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - begun))
    return best


def print_peaks(seconds: dict[str, float], rows: int, path: Path, n_threads: int) -> None:
    """Print how much of the processor's 8-bit arithmetic passes of the most rows reach.

    Args:
        seconds: of such a pass, by setting.
    """
    multiply_adds = rows * sum(
        math.prod(tensor.shape) for tensor in read_header(path).tensors if len(tensor.shape) == 2
    )
    peaks = {name: peak for name in SETS if (peak := int8_peak(name, n_threads)) is not None}
    for name, peak in peaks.items():
        print(f"{name:24}{peak / 1e9:9.0f} billion 8-bit multiply-adds/s in registers, {n_threads} threads")
    for setting, taken in seconds.items():
        speed = multiply_adds / taken
        own = setting.removeprefix(f"{setting_of(OWN)}-")
        peak = peaks.get(own) or max(peaks.values(), default=0.0)
        share = f" {100 * speed / peak:5.0f} %" if peak else ""
        print(f"{setting:24}{speed / 1e9:9.0f} billion/s at {rows} rows{share}")


def int8_peak(name: str, n_threads: int) -> float | None:
    """Return the 8-bit multiply-adds per second of all threads in an instruction set; None where it lacks."""
    flags = next((s.flags for s in build.sources() if s.name == SETS[name]), None)
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if flags is None or compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        macro = f"-DSET_{name.upper().replace('-', '_')}"
        source = Path(__file__).with_name("int8_peak.cpp")
        command = [compiler, "-std=c++17", "-O3", *flags, macro, str(source), "-o", str(program)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        started = [subprocess.Popen([program], stdout=subprocess.PIPE, text=True) for _ in range(n_threads)]
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        return None  # the processor lacks the instructions
    return sum(map(float, said))


def measure(
    settings: Sequence[str], given: Sequence[str], rows: Sequence[int], rounds: int
) -> dict[tuple[str, int], float]:
    """The median seconds of a pass for each setting and number of rows.

    Args:
        given: the model, the tokens before the rows, and the threads.
    """
    model, text, threads = given
    command = [sys.executable, "-m", "benchmarks.kernels", _WORKER, "--model", model, "--text", text]
    command += ["--threads", threads, "--rows", *map(str, rows)]
    workers = {
        setting: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, VARIABLE: setting},
        )
        for setting in settings
    }
    seconds: dict[tuple[str, int], list[float]] = {}
    try:
        for turn in range(rounds + 1):
            for n in rows:
                for setting, worker in workers.items():
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    print(n, file=worker.stdin, flush=True)
                    taken = float(json.loads(worker.stdout.readline()))
                    if turn:  # the first one warms up
                        seconds.setdefault((setting, n), []).append(taken)
    finally:
        for worker in workers.values():
            if worker.stdin is not None:
                worker.stdin.close()
            worker.wait()
    return {key: statistics.median(taken) for key, taken in seconds.items()}


def serve(path: Path, text: int, most: int, n_threads: int) -> None:
    """Time a pass for each number of rows that is read, and print its seconds."""
    rng = np.random.default_rng(0)
    with Model(path) as model:
        context = Context(
            model, n_cells=text + most + 256, n_rows=_ROWS, n_outputs=most, n_sequences=1, n_threads=n_threads
        )
        tokens = rng.integers(0, model.vocabulary.n_tokens, text + most, dtype=np.int32)
        for at in range(0, text, _ROWS):
            piece = tokens[at : min(text, at + _ROWS)]
            context.decode(TokenBatch.run(piece, at, n_sequences=1, logits="last"))
        for line in sys.stdin:
            batch = TokenBatch.run(tokens[text : text + int(line)], text, n_sequences=1, logits="all")
            begun = time.perf_counter()
            context.decode(batch)
            context.logits()
            print(time.perf_counter() - begun, flush=True)
            context.remove(0, text)
        context.close()


def _settings() -> list[str]:
    """Each layout of this processor, and its own kernels by instruction set."""
    start_backend()
    working = layouts_in_use([layout.name for layout in available_layouts()], ensure_report())
    of_ggml = [setting for name in working if name != OWN and (setting := setting_of(name))]
    own = library.loaded() if OWN in working else None
    return [PLAIN, *of_ggml, *(map(setting_for, own.instruction_sets()) if own is not None else ())]


if __name__ == "__main__":
    main()
