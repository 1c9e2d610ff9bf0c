"""The full profile of a model, or of a pair, on this machine: everything is measured and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.costs.yields import Yields
from edgespec.engine.engine import Engine
from edgespec.errors import StreamError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.measure.profiler import (
    Watched,
    measure_passes,
    measure_steps,
    watch_trees,
    write_texts,
)
from edgespec.measure.throughput import measure_reading, memory_bandwidth
from edgespec.profiles.store import DiskProfile, DraftProfile, PassProfile, ProfileStore, disk_key
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.drafters.base import NoDrafter

Progress = Callable[[str, float], None]

_SMALL_TREE = 12
_SAMPLED = 1.0
_ENOUGH_DRAFTS = 10
# How the time is shared out.
_DISK, _PASSES = 0.08, 0.25
_WRITING, _LARGE, _SMALL = 0.5, 0.33, 0.17  # of what is left


@dataclass(frozen=True)
class FullProfile:
    """What was measured.

    Attributes:
        disk: None where the file could not be read past llama.cpp.
        bandwidth: of memory, bytes a second.
        drafts, greedy, sampled: None without a drafter, or with one whose steps cost nothing.
        noisy: the machine was busy with other things; figures may be too slow.
        seconds: it took.
    """

    model: str
    drafter: str
    exact: bool
    threads: int
    passes: PassProfile
    streamed_bytes: int
    bandwidth: float
    disk: DiskProfile | None
    drafts: DraftProfile | None
    greedy: Yields | None
    sampled: Yields | None
    noisy: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What scripts see."""
        parts = {
            name: part.to_json() if part is not None else None
            for name, part in (
                ("passes", self.passes),
                ("disk", self.disk),
                ("drafts", self.drafts),
                ("greedy", self.greedy),
                ("sampled", self.sampled),
            )
        }
        return {
            "model": self.model,
            "drafter": self.drafter,
            "exact": self.exact,
            "threads": self.threads,
            "streamed_bytes_per_pass": self.streamed_bytes,
            "memory_bandwidth": round(self.bandwidth),
            "noisy": self.noisy,
            "seconds": round(self.seconds, 1),
            **parts,
        }


def measure_full_profile(
    engine: Engine, seconds: float, on_progress: Progress, store: ProfileStore | None = None
) -> FullProfile:
    """Measure a loaded pair for about so many seconds, and keep what was found.

    Raises:
        DecodeAborted: stopped from outside; nothing of an unfinished part is kept.
    """
    store = store or ProfileStore()
    keys = engine.keys
    assert keys is not None  # every engine that was loaded has them
    begun = time.perf_counter()
    drafts = not isinstance(engine.drafter, NoDrafter)
    file = _streamed_file(engine)
    arriving = StreamRate(engine.target.model.weights)
    try:
        disk = measure_reading(file, seconds * _DISK, on_progress)
        store.put(disk_key(file), disk)
    except (StreamError, OSError):
        disk = None
    bandwidth = memory_bandwidth(keys.threads)
    passes, noisy = measure_passes(engine.target, seconds * (_PASSES if drafts else 1 - _DISK), on_progress)
    passes = replace(passes, load_s=engine.load_s)
    store.put(keys.passes, passes)
    steps = greedy = sampled = None
    if drafts:
        steps = measure_steps(engine.drafter, engine.limits.width, on_progress)
        most = engine.limits.budget
        watched: list[Watched] = []
        rounds: list[PassRecord] = []
        for sampled_at, share in ((0.0, 0.65), (_SAMPLED, 0.35)):
            config = GenerationConfig(max_tokens=200, temperature=sampled_at, seed=1)
            left = share * seconds * (1 - _DISK - _PASSES)
            written = write_texts(engine, config, left * _WRITING, on_progress)
            accept_s = written.accept_s
            rounds += written.passes
            watched += [
                watch_trees(engine, config, written.texts, budget, left * part, on_progress)
                for budget, part in ((most, _LARGE), (min(_SMALL_TREE, most), _SMALL))
            ]
        greedy, sampled = _with_steps(*watched[:2]), _with_steps(*watched[2:])
        for temperature, yields in ((0.0, greedy), (_SAMPLED, sampled)):
            if yields is not None:
                store.put(keys.yields(temperature), yields)
        if steps is not None:
            steps = replace(steps, overhead=_overhead(steps, rounds, watched))
            store.put(keys.drafts, steps)
        # Of the whole time, which is longer than that of the passes: disks do not give the same all the time.
        passes = replace(passes, accept_s=accept_s, read_rate=arriving.rate)
        store.put(keys.passes, passes)
    engine.observed.forget()  # these passes are in what was just kept
    return FullProfile(
        model=engine.target.model.path.name,
        drafter=engine.drafter.name,
        exact=engine.target.rule is not None,
        threads=keys.threads,
        passes=passes,
        streamed_bytes=engine.target.model.weights.streamed_bytes,
        bandwidth=bandwidth,
        disk=disk,
        drafts=steps,
        greedy=greedy,
        sampled=sampled,
        noisy=noisy,
        seconds=time.perf_counter() - begun,
    )


def _streamed_file(engine: Engine) -> Path:
    """The file that weights come from."""
    model = engine.target.model
    return next(iter(model.weights.paths), model.path)


def _with_steps(watched: Watched, small: Watched) -> Yields | None:
    if watched.yields is None or small.yields is None:
        return watched.yields
    return watched.yields.along(small.yields)


def _overhead(steps: DraftProfile, rounds: list[PassRecord], watched: list[Watched]) -> float:
    """Seconds of growing trees over those of the decodes in it.

    In real rounds, if there were enough: what is read ahead meanwhile takes its part of the processor.
    """
    drafts = [(r.draft_s, r.draft_steps, r.draft_rows) for r in rounds if r.draft_steps]
    if len(drafts) < _ENOUGH_DRAFTS:
        drafts = [(w.draft_s, w.steps, w.rows) for w in watched if w.steps]
    grown = sum(seconds for seconds, _, _ in drafts)
    decoded = sum(n * steps.step.at(rows / n) for _, n, rows in drafts)
    return max(grown / decoded, 1.0) if decoded > 0 else 1.0
