"""What llama.cpp's callback costs where layers are streamed, in passes of one token.

    python -m benchmarks.callback

The same model in memory, and with nearly all of it in memory and the rest streamed: by the compiled callback,
and by that in Python. Milliseconds of a pass without its waits for the disk, medians of alternating answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp

import edgespec
from benchmarks.workload import PROMPTS, q4_0
from edgespec.errors import MemoryLimitError
from edgespec.generation.config import GenerationConfig
from edgespec.kernels.native import gate
from edgespec.models.llama.runtime.context import Context

SETTINGS: dict[str, Any] = {"draft": "none", "exact": False, "context": 512, "learn": False}
COMPILED = {"compiled": True, "python": False}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    model = q4_0()
    budget = _bytes_needed(model) - (1 << 20)  # nearly everything is in memory
    with ExitStack() as stack:
        engines = {"in memory": stack.enter_context(edgespec.load(model, **SETTINGS))}
        for name, found in COMPILED.items():
            with mock.patch.object(gate, "compiled", lambda found=found: found):
                loaded = edgespec.load(model, offload="stream", memory=budget, **SETTINGS)
            engines[name] = stack.enter_context(loaded)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            for name, engine in engines.items():
                engine.target.rewind(0)
                with _timed(engine.target.context) as passes:
                    engine.generate(PROMPTS[1], GenerationConfig(max_tokens=options.tokens))
                if number:  # the first answer learns where the graph has to stop
                    times[name].append(statistics.median(passes))
    result = {}
    for name, found_times in times.items():
        pairs = zip(found_times, times["in memory"], strict=True)
        more = statistics.median(own / base for own, base in pairs) - 1
        result[name] = {"ms": 1e3 * statistics.median(found_times), "more": more}
        print(f"{name:>10}: {result[name]['ms']:.3f} ms, {100 * more:+.1f} %")
    print(json.dumps(result))


def _bytes_needed(model: Path) -> int:
    """The least budget that holds the whole model."""
    budget = 1 << 20
    while True:
        try:
            edgespec.load(model, offload="none", memory=budget, **SETTINGS).close()
        except MemoryLimitError as error:
            if error.least is None:
                raise
            budget = error.least
        else:
            return budget


@contextmanager
def _timed(context: Context) -> Iterator[list[float]]:
    """Seconds of each pass without its waits."""
    seconds: list[float] = []
    decode = llama_cpp.llama_decode

    def timed(*arguments: Any) -> int:
        start, waited = time.perf_counter(), context.waited_s
        code: int = decode(*arguments)
        seconds.append(time.perf_counter() - start - (context.waited_s - waited))
        return code

    with mock.patch.object(llama_cpp, "llama_decode", timed):
        yield seconds


if __name__ == "__main__":
    main()
