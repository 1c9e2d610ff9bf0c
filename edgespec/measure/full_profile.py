"""The full profile of a model, or of a pair of models, on this machine: measure everything, and store it."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
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
from edgespec.speculation.sizing.yield_meter import YieldMeter

PROMPTS = (
    "Write a Python function that counts the words in a text, and explain it briefly.",
    "What should somebody know who visits the mountains for the first time?",
    "Summarise in two sentences: Rivers carve valleys over thousands of years. Where the rock is soft the "
    "valley grows wide, and where it is hard the river falls over steps. At its end it leaves sand and mud.",
    "Anna has 12 apples, gives a third of them to Ben and eats two. How many are left? Think step by step.",
    "Translate into German: The library is closed on Monday, but the garden behind it is open all week.",
)
_TEXT_TOKENS, _LEAST_TOKENS = 64, 32  # most and least tokens of an answer
_SAMPLED = 1.0
_DISK, _PASSES, _GREEDY = 0.08, 0.25, 0.45  # shares of the time


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
        # Large trees show what smaller ones yield.
        engine.speculator.set_budget(engine.speculator.limits.budget)
        config = GenerationConfig(max_tokens=_TEXT_TOKENS, seed=1)
        greedy, rounds = _write_answers(engine, config, _GREEDY * seconds, on_progress)
        warm = config.with_(temperature=_SAMPLED)
        left_s = (1 - _DISK - _PASSES - _GREEDY) * seconds
        sampled, more_rounds = _write_answers(engine, warm, left_s, on_progress)
        rounds += more_rounds
        engine.speculator.set_budget(None)
        for temperature, yields in ((0.0, greedy), (_SAMPLED, sampled)):
            if yields is not None:
                store.put(keys.yields(temperature), yields)
        if steps is not None:
            steps = replace(steps, overhead=_overhead(steps, rounds))
            store.put(keys.drafts, steps)
        # The rate over the whole measurement, because the speed of a disk varies over time.
        accept_s = statistics.median([record.accept_s for record in rounds] or [0.0])
        passes = replace(passes, accept_s=accept_s, read_rate=arriving.rate)
        store.put(keys.passes, passes)
    experts = None
    if engine.target.model.weights.expert_use is not None:
        if not rounds:
            config = GenerationConfig(max_tokens=_TEXT_TOKENS)
            _, rounds = _write_answers(engine, config, seconds / 2, on_progress)
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


def _write_answers(
    engine: Engine, config: GenerationConfig, seconds: float, on_progress: Progress
) -> tuple[TreeYields | None, list[PassRecord]]:
    """Begin the target's answers to the built-in prompts in turn, until the time is up.

    Returns:
        What their trees yielded, if there were any; and the passes of all answers, except the first of each,
        whose draft also reads the prompt.
    """
    begun, meter = time.perf_counter(), YieldMeter()
    passes: list[PassRecord] = []
    for prompt in PROMPTS:
        n_tokens = 0
        records: list[PassRecord] = []
        with closing(engine.stream(prompt, config)) as chunks:
            for chunk in chunks:
                n_tokens += len(chunk.tokens)
                if chunk.record is not None:
                    records.append(chunk.record)
                    _count(engine, chunk.record, meter)
                now = time.perf_counter()
                on_progress("Letting the target write texts", min((now - begun) / seconds, 1.0))
                if now > begun + seconds and n_tokens >= _LEAST_TOKENS:
                    break
        passes += records[1:]
        if time.perf_counter() > begun + seconds:
            break
    return meter.yields(), passes


def _count(engine: Engine, record: PassRecord, meter: YieldMeter) -> None:
    """Count what became of the tree of a pass, if it had one."""
    if record.nodes > 1 and engine.speculator.last_round is not None:
        tree, accepted = engine.speculator.last_round
        meter.add(tree, accepted.path, accepted.bonus, record.draft_steps, record.draft_rows)


def _overhead(steps: DraftProfile, rounds: list[PassRecord]) -> float:
    """Seconds to grow trees, relative to those of their decodes."""
    drafts = [record for record in rounds if record.draft_steps]
    grown = sum(record.draft_s for record in drafts)
    decoded = sum(draft_seconds(steps.step, record.draft_steps, record.draft_rows) for record in drafts)
    return max(grown / decoded, 1.0) if decoded > 0 else 1.0
