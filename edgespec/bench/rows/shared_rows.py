"""Measures rows of many texts at once: speed of all and of each, and how long the first tokens take."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.base.progress import Progress
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Event, Request
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation, PassRecord
from edgespec.processes.limits import peak_rss

_WARM_UP_TOKENS = 4


@dataclass
class _Run:
    """All texts answered once."""

    passes: list[tuple[PassRecord, ...]] = field(default_factory=list)  # that extended texts
    first: dict[int, float] = field(default_factory=dict)  # text -> seconds to its first token
    answers: dict[int, list[int]] = field(default_factory=dict)  # text -> tokens

    @property
    def fullest(self) -> list[tuple[PassRecord, ...]]:
        """The passes with the most texts: before the first answer ends, and after the last prompt is read."""
        most = max(map(len, self.passes))
        return [records for records in self.passes if len(records) == most]

    @property
    def speed(self) -> float:
        """Tokens per second of all texts together in those passes."""
        tokens = sum(record.accepted + 1 for records in self.fullest for record in records)
        return tokens / sum(records[0].seconds for records in self.fullest)


def texts_of(prompts: Sequence[str], texts: int) -> list[str]:
    """Build this many different prompts: those given in turn, numbered where they repeat."""
    return [
        prompts[n % len(prompts)] + (f" ({n // len(prompts) + 1})" if n >= len(prompts) else "")
        for n in range(texts)
    ]


def measure_texts(
    engine: Engine,
    config: GenerationConfig,
    prompts: Sequence[str],
    texts: int,
    *,
    repetitions: int,
    seconds: float,
    report: Progress,
) -> dict[str, Any]:
    """The fields of a Row for so many texts at once, and the tokens of each answer.

    Args:
        repetitions: how often, after a short one that is not counted.
        seconds: most time to measure.
    """
    report("Warming up", 0.0)
    engine.forget_texts()  # from here on, what is learned from these very questions is kept nowhere
    engine.generate(prompts[0], config.with_(max_tokens=_WARM_UP_TOKENS))
    runs: list[_Run] = []
    end = time.monotonic() + seconds
    cut = False
    for number in range(repetitions):
        report("Answering", number / repetitions)
        engine.target.rewind(0)
        engine.forget_texts()
        run = _Run()
        cut = not _answer_all(engine, config, texts_of(prompts, texts), run, end)
        if run.passes:
            runs.append(run)
        if cut:
            break
    if not runs:
        return {"error": "No pass finished in the time for a row. Raise --row-seconds."}
    return _result(engine, runs, texts, cut=cut)


def _answer_all(engine: Engine, config: GenerationConfig, prompts: list[str], run: _Run, end: float) -> bool:
    """Answer all prompts at once; False if there was no time for all of it."""
    requests = [Request(prompt, config, key=index) for index, prompt in enumerate(prompts)]
    start = time.monotonic()
    events = engine.stream_many(
        requests, parallel=len(prompts), on_pass=lambda records: run.passes.append(tuple(records))
    )
    with contextlib.closing(events):
        for event in events:
            _count(event, run, time.monotonic() - start)
            if time.monotonic() > end and run.passes and len(run.answers) < len(prompts):
                return False
    return True


def _count(event: Event, run: _Run, seconds: float) -> None:
    if event.error is not None:
        raise event.error
    chunk, index = event.chunk, event.request.key
    assert chunk is not None, "an event without an error has a chunk"
    if chunk.record is not None:
        run.first.setdefault(index, seconds)
    if chunk.generation is not None:
        run.answers[index] = chunk.generation.tokens


def _result(engine: Engine, runs: list[_Run], texts: int, *, cut: bool) -> dict[str, Any]:
    counted = runs[:-1] if cut and len(runs) > 1 else runs
    full = [records for run in counted for records in run.fullest]
    samples = [run.speed for run in counted]
    answer = engine.last_generation
    assert answer is not None, "there was a warm-up"
    return {
        **figures_of(engine, full, answer),
        "samples": samples,
        "texts": texts,
        "texts_per_pass": sum(map(len, full)) / len(full),
        "tokens_per_second_a_text": statistics.median(samples) / max(len(records) for records in full),
        "first_token_s": statistics.median(s for run in counted for s in run.first.values()),
        "answers": [runs[0].answers[index] for index in sorted(runs[0].answers)] if not cut else [],
        "cut": cut,
    }


def figures_of(engine: Engine, passes: Sequence[Sequence[PassRecord]], answer: Generation) -> dict[str, Any]:
    """The fields of a Row that follow from its passes, and from any of its answers.

    Args:
        passes: for each, the records of the texts that it extended.
    """
    n, rule = len(passes), engine.target.rule
    nodes = [sum(record.nodes for record in records) for records in passes]
    firsts = [records[0] for records in passes]  # the seconds are those of the whole pass
    return {
        "tokens_per_pass": sum(record.accepted + 1 for records in passes for record in records) / n,
        "nodes_per_pass": sum(nodes) / n,
        "round_s": sum(record.seconds for record in firsts) / n,
        "pass_s": sum(record.verify_s for record in firsts) / n,
        "draft_s": sum(record.draft_s for record in firsts) / n,
        "wait_s": sum(record.wait_s for record in firsts) / n,
        "rows": dict(Counter(rule.padded(rows) if rule else rows for rows in nodes)),
        "streamed_bytes_per_pass": answer.memory.streamed_bytes_per_pass,
        "budget_bytes": answer.memory.budget_bytes,
        "peak_rss_bytes": peak_rss(),
        "exact": answer.exact,
        "lossy": answer.lossy,
        "kernels": engine.target.identity.get("kernels"),
    }
