"""llama.cpp's own batched decoding, timed through the bindings: what others get from the same model.

It does and prints what llama.cpp's program `llama-batched-bench` does, for machines that do not have it: so
many sequences, each with a part of the cache of its own, read their prompts together and are then extended by
a row each in every pass. No tokens are chosen, since choosing is no work of llama.cpp's. There is no row rule
here, so this decoding is not exact.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from edgespec.errors import BackendError, EdgeSpecError, MemoryLimitError
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.model import Model

_PASS_ROWS = 512  # of a prompt, llama.cpp's default
_CELLS = 256  # llama.cpp gives each sequence a multiple of these
_WARM_UP_ROWS = 16


@dataclass(frozen=True)
class DecodeWork:
    """The work of a decode.

    Attributes:
        prompt: tokens of each prompt.
        tokens: tokens that each sequence gets then.
        sequences: how many there are.
    """

    prompt: int
    tokens: int
    sequences: int


def main() -> None:
    """Decode, and print the figures as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("prompt", "tokens", "texts", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--no-repack", action="store_true")
    options = parser.parse_args()
    work = DecodeWork(options.prompt, options.tokens, options.texts)
    try:
        model = Model(options.model, memory_map=True, repack=not options.no_repack)
        try:
            figures = measure(model, work, options.threads)
        finally:
            model.close()
    except EdgeSpecError as error:
        raise SystemExit(str(error)) from error
    print(json.dumps(figures), flush=True)


def measure(model: Model, work: DecodeWork, threads: int) -> dict[str, float]:
    """Seconds of reading prompts and of extending sequences, and tokens per second, named as by llama.cpp.

    And the processor time of extending, which other programs disturb less.

    Raises:
        MemoryLimitError: llama.cpp cannot allocate the cache.
        BackendError: it cannot decode.
    """
    with _context(model, work, threads) as handle:
        _decode(handle, _rows(np.arange(_WARM_UP_ROWS), 0, 1))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(handle), False)
        start = time.perf_counter()
        every = _rows(np.arange(work.prompt), 0, work.sequences)
        for at in range(0, len(every), _PASS_ROWS):
            _decode(handle, every.part(at, at + _PASS_ROWS))
        read, busy = time.perf_counter(), time.process_time()
        for step in range(work.tokens):
            _decode(handle, _rows(np.arange(1), work.prompt + step, work.sequences, wanted=True))
        end, busy = time.perf_counter(), time.process_time() - busy
    read_s, extend_s = read - start, end - read
    return {
        "pp": work.prompt,
        "tg": work.tokens,
        "pl": work.sequences,
        "t_pp": read_s,
        "t_tg": extend_s,
        "cpu_tg": busy,
        "speed_pp": work.sequences * work.prompt / read_s,
        "speed_tg": work.sequences * work.tokens / extend_s,
    }


@contextmanager
def _context(model: Model, work: DecodeWork, threads: int) -> Iterator[Any]:
    params = llama_cpp.llama_context_default_params()
    each = -(-(work.prompt + work.tokens) // _CELLS) * _CELLS
    params.n_ctx = work.sequences * each
    params.n_batch = params.n_ubatch = _PASS_ROWS
    params.n_seq_max = work.sequences
    params.n_threads = params.n_threads_batch = threads
    params.no_perf = True
    handle = llama_cpp.llama_init_from_model(model.handle, params)
    if not handle:
        raise MemoryLimitError(f"llama.cpp cannot set up a cache for {work.sequences} texts.")
    try:
        yield handle
    finally:
        llama_cpp.llama_free(handle)


def _rows(positions: np.ndarray[Any, Any], start: int, sequences: int, *, wanted: bool = False) -> TokenBatch:
    """Rows at these positions behind `start`, for every sequence; the tokens do not matter."""
    n = len(positions) * sequences
    return TokenBatch(
        tokens=np.zeros(n, dtype=np.int32),
        positions=np.tile(positions + start, sequences).astype(np.int32),
        sequence_ids=np.repeat(np.arange(sequences), len(positions)).astype(np.int32),
        offsets=np.arange(n + 1, dtype=np.int64),
        wants_logits=np.full(n, wanted, dtype=np.bool_),
    )


def _decode(handle: Any, batch: TokenBatch) -> None:
    struct, keep_alive = batch.to_llama()
    code = llama_cpp.llama_decode(handle, struct)
    llama_cpp.llama_synchronize(handle)
    del keep_alive
    if code:
        raise BackendError(f"llama.cpp failed to decode (code {code}).")
