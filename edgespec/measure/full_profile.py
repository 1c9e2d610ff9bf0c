"""The full profile of a model, or of a pair of models, on this machine: measure everything, and store it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.base.progress import Progress
from edgespec.costs.pass_time import draft_seconds
from edgespec.costs.yields import TreeYields
from edgespec.engine.engine import Engine
from edgespec.errors import StreamError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.expert_use import ExpertUse
from edgespec.generation.result import PassRecord
from edgespec.measure.draft_steps import measure_steps
from edgespec.measure.passes import measure_passes
from edgespec.measure.throughput import measure_reading
from edgespec.measure.trees import TreeStatistics, measure_trees, write_answers
from edgespec.profiles.store import (
    DiskProfile,
    DraftProfile,
    ExpertProfile,
    PassProfile,
    ProfileStore,
    disk_key,
)
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.drafters.base import NoDrafter

_SMALL_TREE = 12
_SAMPLED = 1.0
_ENOUGH_DRAFTS = 10
# Shares of the time.
_DISK, _PASSES = 0.08, 0.25
_WRITING, _LARGE, _SMALL = 0.5, 0.33, 0.17  # of the remaining time


@dataclass(frozen=True)
class FullProfile:
    """Everything that was measured."""

    model: str
    drafter: str
    exact: bool
    threads: int
    passes: PassProfile
    streamed_bytes: int
    disk: DiskProfile | None  # None if the model file could not be read directly
    drafts: DraftProfile | None  # None without a drafter, or with one whose steps take next to no time
    # what trees yield; None without a drafter
    greedy: TreeYields | None
    sampled: TreeYields | None
    experts: ExpertProfile | None  # how often experts were in memory, if single experts are streamed
    noisy: bool  # whether the machine was busy with other programs, so that times may be too long
    seconds: float  # how long the measurement took
    bandwidth: float | None = None  # memory bandwidth in bytes per second; None if it was not measured
    devices: tuple[str, ...] = ()  # graphics cards and others that could hold layers, in sentences
    layers: str = ""  # which are where, in words; empty if all are on the processor

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        parts = {
            name: part.to_json() if part is not None else None
            for name, part in (
                ("passes", self.passes),
                ("disk", self.disk),
                ("drafts", self.drafts),
                ("greedy", self.greedy),
                ("sampled", self.sampled),
                ("experts", self.experts),
            )
        }
        return {
            "model": self.model,
            "drafter": self.drafter,
            "exact": self.exact,
            "threads": self.threads,
            "devices": list(self.devices),
            "layers": self.layers or None,
            "streamed_bytes_per_pass": self.streamed_bytes,
            "memory_bandwidth": round(self.bandwidth) if self.bandwidth else None,
            "noisy": self.noisy,
            "seconds": round(self.seconds, 1),
            **parts,
        }


def measure_full_profile(
    engine: Engine, seconds: float, on_progress: Progress, store: ProfileStore
) -> FullProfile:
    """Measure a loaded pair for about this many seconds, and store the results.

    Raises:
        DecodeAborted: stopped from outside; nothing of an unfinished part is stored.
    """
    keys = engine.keys
    assert keys is not None  # every loaded engine has them
    begun = time.perf_counter()
    drafts = not isinstance(engine.drafter, NoDrafter)
    arriving = StreamRate(engine.target.model.weights)
    try:
        disk = _measured_disks(_streamed_files(engine), seconds * _DISK, on_progress, store)
    except (StreamError, OSError):
        disk = None
    passes, noisy = measure_passes(engine.target, seconds * (_PASSES if drafts else 1 - _DISK), on_progress)
    passes = replace(passes, load_s=engine.load_s)
    store.put(keys.passes, passes)
    steps = greedy = sampled = None
    rounds: list[PassRecord] = []
    if drafts:
        steps = measure_steps(engine.drafter, engine.speculator.limits.width, on_progress)
        most = engine.speculator.limits.budget
        trees: list[TreeStatistics] = []
        for sampled_at, share in ((0.0, 0.65), (_SAMPLED, 0.35)):
            config = GenerationConfig(max_tokens=200, temperature=sampled_at, seed=1)
            left = share * seconds * (1 - _DISK - _PASSES)
            alone = not engine.drafter.reads_target  # otherwise passes are needed to see what it drafts
            written = write_answers(engine, config, left * _WRITING if alone else left, on_progress)
            accept_s = written.accept_s
            rounds += written.passes
            if not alone:
                trees += [TreeStatistics(written.yields), TreeStatistics()]
                continue
            trees += [
                measure_trees(engine, config, written.samples, budget, left * part, on_progress)
                for budget, part in ((most, _LARGE), (min(_SMALL_TREE, most), _SMALL))
            ]
        greedy, sampled = _with_steps(*trees[:2]), _with_steps(*trees[2:])
        for temperature, yields in ((0.0, greedy), (_SAMPLED, sampled)):
            if yields is not None:
                store.put(keys.yields(temperature), yields)
        if steps is not None:
            steps = replace(steps, overhead=_overhead(steps, rounds, trees))
            store.put(keys.drafts, steps)
        # The rate over the whole measurement, because the speed of a disk varies over time.
        passes = replace(passes, accept_s=accept_s, read_rate=arriving.rate)
        store.put(keys.passes, passes)
    experts = None
    if engine.target.model.weights.expert_use is not None:
        rounds = rounds or write_answers(engine, GenerationConfig(), seconds * _WRITING, on_progress).passes
        experts = _expert_profile(rounds, engine.target.model.weights.experts_held)
        store.put_experts(keys.target, experts)
    engine.speculator.profile_updates.forget()  # the new profile already contains these passes
    return FullProfile(
        model=engine.target.model.path.name,
        drafter=engine.drafter.name,
        exact=engine.target.rule is not None,
        threads=keys.threads,
        passes=passes,
        streamed_bytes=engine.target.model.weights.streamed_bytes,
        disk=disk,
        drafts=steps,
        greedy=greedy,
        sampled=sampled,
        experts=experts,
        noisy=noisy,
        seconds=time.perf_counter() - begun,
        devices=engine.memory.devices,
        layers=engine.memory.layers,
    )


def _streamed_files(engine: Engine) -> list[Path]:
    """The file that weights are streamed from, or one on each disk."""
    model = engine.target.model
    return [*model.weights.disk_rates] or [next(iter(model.weights.paths), model.path)]


def _measured_disks(
    files: list[Path], seconds: float, on_progress: Progress, store: ProfileStore
) -> DiskProfile:
    """Measure and store the disk of each file; returns all together, with the first one's best setting.

    Raises:
        StreamError, OSError: a file cannot be read.
    """
    found = [
        store.put_reading(disk_key(file), measure_reading(file, seconds / len(files), on_progress))
        for file in files
    ]
    return replace(
        found[0],
        direct=sum(disk.direct for disk in found),
        buffered=sum(disk.buffered for disk in found),
        streamed_rate=sum(disk.streamed_rate for disk in found),
    )


def _expert_profile(rounds: list[PassRecord], held: float) -> ExpertProfile:
    """Measure how often experts were in memory while the target wrote texts."""
    used = (record.experts for record in rounds if record.experts is not None)
    return ExpertProfile(held, sum(used, ExpertUse()).hit_rate)


def _with_steps(large: TreeStatistics, small: TreeStatistics) -> TreeYields | None:
    if large.yields is None or small.yields is None:
        return large.yields
    return large.yields.with_steps_of(small.yields)


def _overhead(steps: DraftProfile, rounds: list[PassRecord], trees: list[TreeStatistics]) -> float:
    """Seconds to grow trees, relative to those of their decodes.

    From real rounds if there are enough, because reading ahead takes its share of the processor there.
    """
    drafts = [(r.draft_s, r.draft_steps, r.draft_rows) for r in rounds if r.draft_steps]
    if len(drafts) < _ENOUGH_DRAFTS:
        drafts = [(w.draft_s, w.steps, w.rows) for w in trees if w.steps]
    grown = sum(seconds for seconds, _, _ in drafts)
    decoded = sum(draft_seconds(steps.step, n, rows) for _, n, rows in drafts)
    return max(grown / decoded, 1.0) if decoded > 0 else 1.0
