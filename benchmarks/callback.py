"""The cost of llama.cpp's eval callback in passes of one token, where the graph stops after every layer.

    python -m benchmarks.callback

The same model in memory: without a callback, with the compiled one, and with that in Python. An observer that
does nothing is called after each layer, as where every layer is streamed; nothing is read from disk, whose
reader would take time from the cores. Milliseconds of a pass, medians of alternating answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import llama_cpp

import edgespec
from benchmarks.workload import PROMPTS, q4_0
from edgespec.generation.config import GenerationConfig
from edgespec.kernels.ggml import Address
from edgespec.kernels.native import gate
from edgespec.kernels.native.library import Branching
from edgespec.kernels.watch import new_watch
from edgespec.models.llama.runtime.graph import GraphCallback, GraphObserver

SETTINGS: dict[str, Any] = {"draft": "none", "exact": False, "context": 512, "learn": False}
CALLBACKS = {"none": None, "compiled": True, "python": False}


class _AfterEachLayer:
    """An observer that is called after each layer, and does nothing."""

    def __init__(self) -> None:
        self.watch = new_watch()
        self.watch.stop_after(b"l_out-", prefix=True)

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins."""

    def reached(self, node: Address) -> bool:
        """Stop here."""
        return True

    def computed(self, node: Address) -> None:
        """A layer has been computed."""

    def end(self, *, completed: bool) -> None:
        """The decode has returned."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_loaded(kind)) for name, kind in CALLBACKS.items()}
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            for name, engine in engines.items():
                engine.target.rewind(0)
                with _timed() as passes:
                    engine.generate(PROMPTS[1], GenerationConfig(max_tokens=options.tokens))
                if number:  # the first answer warms up
                    times[name].append(statistics.median(passes))
    result = {}
    for name, found_times in times.items():
        pairs = zip(found_times, times["none"], strict=True)
        more = statistics.median(own / base for own, base in pairs) - 1
        result[name] = {"ms": 1e3 * statistics.median(found_times), "more": more}
        print(f"{name:>10}: {result[name]['ms']:.3f} ms, {100 * more:+.1f} %")
    print(json.dumps(result))


def _loaded(compiled: bool | None) -> edgespec.Engine:
    """The model in memory, with a callback that is compiled or not; None: without one."""
    if compiled is None:
        return edgespec.load(q4_0(), **SETTINGS)
    init = GraphCallback.__init__

    def observed(
        self: GraphCallback, observers: Iterable[GraphObserver], branching: Branching | None = None
    ) -> None:
        init(self, [*observers, _AfterEachLayer()], branching)

    with (
        mock.patch.object(gate, "compiled", return_value=compiled),
        mock.patch.object(GraphCallback, "__init__", observed),
    ):
        return edgespec.load(q4_0(), **SETTINGS)


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Seconds of each pass."""
    seconds: list[float] = []
    decode = llama_cpp.llama_decode

    def timed(*arguments: Any) -> int:
        start = time.perf_counter()
        code: int = decode(*arguments)
        seconds.append(time.perf_counter() - start)
        return code

    with mock.patch.object(llama_cpp, "llama_decode", timed):
        yield seconds


if __name__ == "__main__":
    main()
