"""Plans against what happens: predicted and measured tokens per second.

    python -m benchmarks.predictions [--seconds 50] [--prompts 6] [--passes 8]

The target is the widened SmolLM2-135M-Instruct (Q4_0) of benchmarks.streaming. Every pair is profiled once,
at one memory budget, and then used for a dozen answers, as a person would; then answers to other prompts are
timed at several budgets of memory and several trees, each predicted just before. The last lines compare the
plan's choice with the best of the grid. Nothing is known at the beginning, and what was known to EdgeSpec
before comes back in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from platformdirs import user_cache_path

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.workload import FOLDER, PROMPTS, dropped_four, q4_0, smollm2, widened
from edgespec.config import Config
from edgespec.engine.engine import Engine
from edgespec.files.kept import Kept
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.machine.probe import usable_cores
from edgespec.measure.full_profile import measure_full_profile
from edgespec.plans.model_plan import plan_for
from edgespec.plans.report import PlanReport
from edgespec.profiles.stream_rate import StreamRate

CONTEXT = 1024
_LEARNED = Kept.LEARNED.folder
_KNOWN = (_LEARNED, user_cache_path("edgespec") / "profiles")


@dataclass(frozen=True)
class Speed:
    """Means over passes: tokens, seconds of the draft, of the whole round; and the disk's bytes a second."""

    tokens: float
    draft_s: float
    round_s: float
    read_rate: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.round_s


@dataclass(frozen=True)
class Row:
    """One configuration."""

    memory: int
    drafter: str
    budget: int
    predicted: Speed
    measured: Speed

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1


def main() -> None:
    options = _parse()
    target = widened(q4_0(), options.target_bytes, options.folder)
    drafters = {"none": "none", "Q4_1": str(smollm2()), "four layers dropped": str(dropped_four())}
    with _knowing_nothing():
        for name, draft in drafters.items():
            if draft != "none":
                _profile(target, draft, options.profile_memory * 10**6, options.seconds)
                print(f"profiled with {name}", file=sys.stderr)
                _use(target, draft, options.profile_memory * 10**6, options)
        _measure_all(target, drafters, options)


def _measure_all(target: Path, drafters: dict[str, str], options: argparse.Namespace) -> None:
    rows = []
    for megabytes in options.memories:
        for name, draft in drafters.items():
            plan = _plan(target, draft, megabytes * 10**6)
            for budget in [1] if draft == "none" else options.budgets:
                measured = _measured(target, draft, megabytes * 10**6, budget, options)
                rows.append(Row(megabytes, name, budget, _predicted(plan, budget), measured))
                print(_line(rows[-1]), file=sys.stderr)
    print_head(
        *("memory, MB", "drafter", "nodes", "predicted tokens/s", "measured", "error"),
        *("tokens a pass, predicted and measured", "draft, s", "round, s", "disk, GB/s"),
    )
    for row in rows:
        print(_line(row))
    errors = [abs(row.error) for row in rows]
    middle, largest = statistics.median(errors), max(errors)
    print(f"\n{len(rows)} configurations: median error {middle:.1%}, largest {largest:.1%}")
    _compare_choices(target, drafters, rows, options)
    print(json.dumps([asdict(row) for row in rows]))


def _predicted(plan: PlanReport, budget: int) -> Speed:
    """For trees of so many nodes; one node is plain decoding."""
    wanted = (p for p in plan.sizes if p.nodes == budget and (p.drafter == "none") == (budget == 1))
    found = next(wanted)
    read_s = found.read_s or math.inf
    return Speed(found.tokens_per_pass, found.draft_s, found.round_s, found.holding.streamed_bytes / read_s)


def _compare_choices(
    target: Path, drafters: dict[str, str], rows: list[Row], options: argparse.Namespace
) -> None:
    by_memory: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_memory[row.memory].append(row)
    for megabytes, grid in by_memory.items():
        best = max(grid, key=lambda row: row.measured.tokens_per_second)
        chosen = max(grid, key=lambda row: row.predicted.tokens_per_second)
        most, got = best.measured.tokens_per_second, chosen.measured.tokens_per_second
        auto = _measured(target, drafters[best.drafter], megabytes * 10**6, None, options).tokens_per_second
        print(
            f"{megabytes} MB: best of the grid {best.drafter}, {best.budget} nodes, {most:.2f} tokens/s; "
            f"the plan's choice {chosen.drafter}, {chosen.budget} nodes, {got:.2f} "
            f"({got / most:.2f} of that); "
            f"sized while running {auto:.2f} ({auto / most:.2f})"
        )


@contextmanager
def _as_it_was(folder: Path) -> Iterator[None]:
    """Afterwards the folder holds what it held before."""
    with tempfile.TemporaryDirectory() as aside:
        before = Path(aside) / folder.name
        shutil.copytree(folder, before) if folder.exists() else before.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(before, folder)


@contextmanager
def _knowing_nothing() -> Iterator[None]:
    """With profiles and learned acceptance put aside; of a run that was killed, they come back now."""
    for folder in _KNOWN:
        aside = folder.with_name(folder.name + "-aside")
        if not aside.exists() and folder.exists():
            folder.rename(aside)
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        for folder in _KNOWN:
            shutil.rmtree(folder, ignore_errors=True)
            aside = folder.with_name(folder.name + "-aside")
            if aside.exists():
                aside.rename(folder)


def _profile(target: Path, draft: str, memory: int, seconds: float) -> None:
    with edgespec.load(target, draft=draft, drafter="model", memory=memory, context=CONTEXT) as engine:
        measure_full_profile(engine, seconds, lambda _what, _fraction: None)


def _use(target: Path, draft: str, memory: int, options: argparse.Namespace) -> None:
    """Answers as a person would have them, after which more is known than from the profile."""
    with edgespec.load(target, draft=draft, drafter="model", memory=memory, context=CONTEXT) as engine:
        for prompt in PROMPTS[1::2]:
            engine.generate(prompt, GenerationConfig(max_tokens=options.used_tokens))


def _plan(target: Path, draft: str, memory: int) -> PlanReport:
    asked = Config.of(model=target, draft=draft, memory=memory, context=CONTEXT, threads=usable_cores())
    return plan_for(asked, lambda _what, _fraction: None)


def _measured(
    target: Path, draft: str, memory: int, budget: int | None, options: argparse.Namespace
) -> Speed:
    """Over several prompts, after one that is not counted.

    What was learned before is known; what these measurements would learn from their prompts is not kept.
    """
    kind = None if draft == "none" else "model"
    with (
        _as_it_was(_LEARNED),
        edgespec.load(
            target, draft=draft, drafter=kind, memory=memory, context=CONTEXT, tree_budget=budget
        ) as engine,
    ):
        engine.generate(PROMPTS[-1], GenerationConfig(max_tokens=8))
        # Plain decoding is slow, and takes as long for every text.
        prompts = PROMPTS[::2][: options.prompts if kind else 2]
        records = [record for prompt in prompts for record in _passes(engine, prompt, options)]
        engine.profile_updates.forget()
        rate = StreamRate(engine.target.model.weights, since_loading=True).rate
    return Speed(
        statistics.mean(record.accepted + 1 for record in records),
        statistics.mean(record.draft_s for record in records),
        statistics.mean(record.seconds for record in records),
        rate,
    )


def _passes(engine: Engine, prompt: str, options: argparse.Namespace) -> list[PassRecord]:
    """The passes of an answer's beginning, but for the first, whose draft also reads the prompt.

    The answer itself is longer, as the last pass of a whole one is cut.
    """
    records = []
    chunks = engine.stream(prompt, GenerationConfig(max_tokens=400))
    for chunk in chunks:
        if chunk.record is not None:
            records.append(chunk.record)
        if sum(record.accepted + 1 for record in records) >= options.tokens:
            break
    chunks.close()
    return records[1:]


def _line(row: Row) -> str:
    return (
        f"| {row.memory} | {row.drafter} | {row.budget} | {row.predicted.tokens_per_second:.2f} "
        f"| {row.measured.tokens_per_second:.2f} | {row.error:+.1%} "
        f"| {row.predicted.tokens:.2f} and {row.measured.tokens:.2f} "
        f"| {row.predicted.draft_s:.3f} and {row.measured.draft_s:.3f} "
        f"| {row.predicted.round_s:.3f} and {row.measured.round_s:.3f} "
        f"| {row.predicted.read_rate / 1e9:.2f} and {row.measured.read_rate / 1e9:.2f} |"
    )


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--profile-memory", type=int, default=1140, help="megabytes while profiling")
    parser.add_argument("--memories", type=int, nargs="+", default=[900, 1140, 1500])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--seconds", type=float, default=50.0, help="of a profile")
    parser.add_argument("--used-tokens", type=int, default=48, help="of each answer before measuring")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
