"""The child process that measures one row: a task on standard input, progress and a result on standard
output.

All are JSON, one object per line. When standard input ends, the parent is gone, and so is the child.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.base.option import naming_flags
from edgespec.base.progress import Progress
from edgespec.config import Config
from edgespec.errors import ContextLengthError, EdgeSpecError
from edgespec.processes.children import end_with_standard_input

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.generation.config import GenerationConfig
    from edgespec.generation.result import Generation

_WARM_UP_TOKENS = 16
_CURVE_ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
_CURVE_ROUNDS = 3
_CURVE_S = 20.0  # at most, for one row count
_READ_BYTES = 8 << 30  # of a large file; reading more would not make the figure more accurate


def main() -> None:
    """Carry out the task; returns when the result is printed."""
    task = json.loads(sys.stdin.readline())
    end_with_standard_input()
    try:
        with naming_flags():  # what is printed comes from the program
            result = _ROLES[task["role"]](task)
    except EdgeSpecError as error:
        result = {"error": str(error)}
    except MemoryError:
        result = {"error": "Not enough memory."}
    _say({"result": result})


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _report(what: str, fraction: float) -> None:
    _say({"progress": what, "fraction": fraction})


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Load once, so that nothing is packed or tried out while rows are measured."""
    from edgespec.models.gguf.header import read_header
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.offload.packing.index import packs_folder, parts_of
    from edgespec.offload.packing.pack import pack_path

    _load(task, _report).close()
    files = ModelFiles.of(read_header(Path(task["load"]["model"])))
    packs = [pack_path(packs_folder(), files, experts=experts) for experts in (True, False)]
    packed = next((path for path in packs if path.exists()), None)
    if packed is not None:
        packed = next(iter(parts_of(packed)), packed)
    path = packed if packed and task["load"].get("pack") != "never" else files.paths[0]
    return {"disk": disk({"path": str(path)})}


def disk(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the speed of reading a file from its disk, from its beginning."""
    from edgespec.measure.throughput import sequential_speed

    path = Path(task["path"])
    _report(f"Reading {path.name} as fast as the disk can", 0.0)
    speed, direct = sequential_speed(path, max_bytes=_READ_BYTES)
    return {"path": str(path), "bytes_per_s": speed, "direct": direct}


def answers(task: dict[str, Any]) -> dict[str, Any]:
    """A row: the same answers several times, after one that is not counted."""
    from edgespec.generation.config import GenerationConfig

    config = GenerationConfig(**task["config"])
    start = time.perf_counter()
    with _load(task, _report) as engine:
        load_s = time.perf_counter() - start
        measured = _Measurement(engine, config, task["prompts"], task["row_seconds"])
        measured.run(task["repetitions"])
        result = measured.result()
        result |= {"load_s": load_s, "drafter": engine.drafter.name}
        if task["curve"]:
            result["curve"] = pass_curve(engine)
    return result


def texts(task: dict[str, Any]) -> dict[str, Any]:
    """A row of many texts at once."""
    from edgespec.bench.rows.shared_rows import measure_texts
    from edgespec.generation.config import GenerationConfig

    start = time.perf_counter()
    with _load(task, _report) as engine:
        load_s = time.perf_counter() - start
        result = measure_texts(
            engine,
            GenerationConfig(**task["config"]),
            task["prompts"],
            task["texts"],
            repetitions=task["repetitions"],
            seconds=task["row_seconds"],
            report=_report,
        )
        return result | {"load_s": load_s, "notes": engine.notes, "drafter": engine.drafter.name}


def pass_curve(engine: Engine) -> dict[int, dict[str, float]]:
    """Seconds of a pass, and of waiting in it, by its rows: medians of a few, after an empty text."""
    import statistics

    import numpy as np

    from edgespec.llama.runtime.batch import TokenBatch

    context = engine.target.context
    engine.target.rewind(0)
    context.clear()
    curve: dict[int, dict[str, float]] = {}
    for rows in (rows for rows in _CURVE_ROWS if rows <= context.n_rows):
        _report(f"Passes of {rows} rows", rows / _CURVE_ROWS[-1])
        batch = TokenBatch.run(np.arange(100, 100 + rows, dtype=np.int32), 0, 1, logits="all")
        seconds: list[float] = []
        waited: list[float] = []
        rounds = _CURVE_ROUNDS + (not curve)  # the first of all is not counted
        while len(seconds) < rounds and (len(seconds) < 2 or sum(seconds) < _CURVE_S):
            start, before = time.perf_counter(), context.waited_s
            context.decode(batch)
            seconds.append(time.perf_counter() - start)
            waited.append(context.waited_s - before)
            context.clear()
        counted = slice(None if curve else 1, None)
        curve[rows] = {"s": statistics.median(seconds[counted]), "wait_s": statistics.median(waited[counted])}
    return curve


class _Measurement:
    """Answers the same prompts several times, within a time limit."""

    def __init__(self, engine: Engine, config: GenerationConfig, prompts: list[str], seconds: float) -> None:
        self._engine = engine
        self._config = config
        self._prompts = prompts
        self._seconds = seconds
        self._repetitions: list[list[Generation]] = []
        self._too_long: list[str] = []
        self._cut = False

    def run(self, repetitions: int) -> None:
        """Measure; whatever is not done in time is left out."""
        self._engine.forget_texts()  # from here on, what is learned from these questions is kept nowhere
        self._warm_up()
        end = time.monotonic() + self._seconds
        for number in range(repetitions):
            made: list[Generation] = []
            self._repetitions.append(made)
            self._engine.forget_texts()  # what was learned from them must not count either
            for index, prompt in enumerate(self._prompts):
                done = (number + index / len(self._prompts)) / repetitions
                _report("Answering", max(done, 1 - (end - time.monotonic()) / self._seconds))
                self._answer(prompt, made, end)
                if self._cut:
                    return

    def _warm_up(self) -> None:
        _report("Warming up", 0.0)
        few = self._config.with_(max_tokens=min(_WARM_UP_TOKENS, self._config.max_tokens or _WARM_UP_TOKENS))
        end = time.monotonic() + self._seconds / 4
        for prompt in self._prompts:
            if self._answer(prompt, [], end, few):
                break
        else:
            raise ContextLengthError(
                f"No prompt fits the context of {self._engine.context} tokens.", "Raise --context."
            )
        self._too_long.clear()
        self._cut = False

    def _answer(
        self, prompt: str, made: list[Generation], end: float, config: GenerationConfig | None = None
    ) -> bool:
        """One answer, from a cache that does not hold its prompt; False if the prompt is too long."""
        self._engine.target.rewind(0)
        try:
            chunks = self._engine.stream(prompt, config or self._config)
            with contextlib.closing(chunks):  # ends an answer that is cut short
                for chunk in chunks:
                    if chunk.generation is None and time.monotonic() > end:
                        self._cut = True
                        break
        except ContextLengthError as error:
            self._too_long.append(error.what)
            return False
        assert self._engine.last_generation is not None
        made.append(self._engine.last_generation)
        return True

    def result(self) -> dict[str, Any]:
        """The fields of a Row, and the tokens of each answer."""
        whole = self._repetitions[:-1] if self._cut else self._repetitions
        counted = whole or self._repetitions
        made = [answer for repetition in counted for answer in repetition]
        passes = [record for answer in made for record in answer.passes]
        if not passes:
            return {"error": "No pass finished in the time for a row. Raise --row-seconds."}
        from edgespec.bench.rows.shared_rows import figures_of

        needed = [record.experts for record in passes if record.experts is not None]
        groups = counted if len(counted) > 1 else [[answer] for answer in made]
        figures = figures_of(self._engine, [(record,) for record in passes], made[0])
        if needed:
            experts = sum(needed[1:], needed[0])
            figures["held"] = self._engine.target.model.weights.experts_held
            figures["hit_rate"] = experts.hit_rate
            # What passes read of experts was counted; what they read of layers is always the same.
            figures["streamed_bytes_per_pass"] = experts.read_bytes // len(passes)
        return {
            **figures,
            "samples": [_speed(group) for group in groups if any(answer.passes for answer in group)],
            "prefill_tokens_per_second": sum(a.prompt_tokens for a in made)
            / max(sum(a.timings.prefill_s for a in made), 1e-9),
            "answers": [answer.tokens for answer in self._repetitions[0]],
            "cut": self._cut,
            "notes": [
                *self._engine.notes,
                *(f"Left out: {what}" for what in dict.fromkeys(self._too_long)),
            ],
        }


def _speed(group: list[Generation]) -> float:
    """Tokens accepted per second of decoding."""
    tokens = sum(record.accepted + 1 for answer in group for record in answer.passes)
    return tokens / sum(record.seconds for answer in group for record in answer.passes)


def _load(task: dict[str, Any], report: Progress) -> Engine:
    from edgespec.loading.load import open_engine

    return open_engine(Config.of(**task["load"]), report)


_ROLES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "prepare": prepare,
    "disk": disk,
    "answers": answers,
    "texts": texts,
}
