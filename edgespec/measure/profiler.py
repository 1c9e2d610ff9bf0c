"""Measurements for sizing trees and for plans: passes, draft steps, and what trees yield.

The quick profile of a new pair takes a few passes before its first answer. The full profile takes most of a
minute: every size is measured several times, in turns, so that a disturbance affects all sizes alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP, fitted_overlap, read_seconds
from edgespec.costs.yields import Yields
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target, TextTree
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.machine.busy import Watch
from edgespec.models.llama.row_rule import MOST_ROWS
from edgespec.profiles.store import DraftProfile, PassProfile
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.policies import tree_policy
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.yield_meter import YieldMeter

Progress = Callable[[str, float], None]

PROMPTS = (
    "Write a Python function that counts the words in a text, and explain it briefly.",
    "What should somebody know who visits the mountains for the first time?",
    "Summarise in two sentences: Rivers carve valleys over thousands of years. Where the rock is soft the "
    "valley grows wide, and where it is hard the river falls over steps. At its end it leaves sand and mud.",
    "Anna has 12 apples, gives a third of them to Ben and eats two. How many are left? Think step by step.",
    "Translate into German: The library is closed on Monday, but the garden behind it is open all week.",
)

_TEXT = 32  # tokens before the rows that are timed
_QUICK_ROWS = (1, 8, 32, 56)
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
_FEW_ROWS = (1, 8, 16, 32, 56, 128, 512)  # if there is no time for several passes of each size
_WIDTHS = (1, 2, 4, 8, 16, 32)
_ROUNDS = 7
_DEEPEST = 16  # depth of the trees that are measured
_TEXT_TOKENS, _LEAST_TOKENS = 64, 32  # most and least tokens of an answer that trees are measured along


@dataclass
class TimingSamples:
    """Repeated timings by size, in seconds."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        self.seconds.setdefault(size, []).append(seconds)

    def curve(self) -> Curve:
        """The curve through the medians."""
        return Curve.through((size, statistics.median(times)) for size, times in self.seconds.items())

    @property
    def spread(self) -> tuple[float, ...]:
        """For each size, half the interquartile range relative to the median."""
        return tuple(_spread(self.seconds[size]) for size in sorted(self.seconds))


def quick_passes(target: Target, seconds: float) -> PassProfile | None:
    """Measure a few passes, one or two of each size; None if that would take longer than `seconds`.

    Raises:
        DecodeAborted: stopped from outside.
    """
    rows = [r for r in _QUICK_ROWS if r <= target.max_nodes]
    timed, whole, arriving = TimingSamples(), TimingSamples(), StreamRate(target.model.weights)
    watch = Watch(target.context.n_threads)
    _time_passes(target, rows[:1], timed, whole, 1, seconds)
    expected = whole.seconds[1][0] * 2 * len(rows)
    if expected > seconds:
        return None
    # Twice if there is time, because the spread shows whether something disturbed them.
    _time_passes(target, rows[1:], timed, whole, 2 if 2 * expected <= seconds else 1, math.inf)
    return replace(_profile(target, timed, whole, arriving.rate), quick=True, busy=watch.pressure)


def quick_steps(drafter: Drafter, width: int) -> DraftProfile | None:
    """Measure a draft step of one row and one of most rows; None where steps take next to no time."""
    from edgespec.drafters.model import ModelDrafter

    if not isinstance(drafter, ModelDrafter):
        return None
    timed = TimingSamples()
    for _ in range(2):
        for rows in (1, width):
            timed.add(rows, drafter.step_seconds(rows))
    best = {rows: min(times) for rows, times in timed.seconds.items()}
    return DraftProfile(Curve.through(best.items()), quick=True)


def measure_passes(target: Target, seconds: float, on_progress: Progress) -> tuple[PassProfile, bool]:
    """Measure the pass curve; also returns whether the machine was too busy, both times.

    Raises:
        DecodeAborted: stopped from outside.
    """
    whole = TimingSamples()
    _time_passes(target, [1], TimingSamples(), whole, 1, seconds)
    sizes = _ROWS if whole.seconds[1][0] * len(_ROWS) * _ROUNDS < seconds / 2 else _FEW_ROWS
    rows = [
        r for r in sizes if r <= _most_rows(target) and (r <= target.max_nodes or target.reads_at_once(r))
    ]
    for attempt in range(2):
        timed, whole, arriving = TimingSamples(), TimingSamples(), StreamRate(target.model.weights)
        watch = Watch(target.context.n_threads)
        _time_passes(target, rows, timed, whole, _ROUNDS, seconds, on_progress)
        profile = replace(_profile(target, timed, whole, arriving.rate), busy=watch.pressure)
        if not profile.disturbed:
            break
        if attempt == 0:
            on_progress("The machine is busy with other things; measuring again", 0.0)
    return profile, profile.disturbed


def measure_steps(drafter: Drafter, width: int, on_progress: Progress) -> DraftProfile | None:
    """Measure the curve of draft steps; None where they take next to no time."""
    from edgespec.drafters.model import ModelDrafter

    if not isinstance(drafter, ModelDrafter):
        return None
    timed = TimingSamples()
    for turn in range(_ROUNDS):
        for rows in (w for w in _WIDTHS if w <= width):
            timed.add(rows, drafter.step_seconds(rows))
        on_progress("Measuring draft steps", (turn + 1) / _ROUNDS)
    return DraftProfile(timed.curve())


@dataclass(frozen=True)
class Text:
    """A text that the target wrote: the tokens of the prompt and of the answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class WrittenTexts:
    """Texts that the target wrote, and the passes that it took.

    Attributes:
        accept_s: seconds of a round outside draft and pass, the median.
        passes: the passes of all answers, except the first of each, whose draft also reads the prompt.
    """

    texts: list[Text]
    accept_s: float
    passes: list[PassRecord]


def write_texts(
    engine: Engine, config: GenerationConfig, seconds: float, on_progress: Progress
) -> WrittenTexts:
    """Let the target begin answers to the built-in prompts, one after the other, until the time is up."""
    begun = time.perf_counter()
    config = config.with_(max_tokens=_TEXT_TOKENS)
    texts: list[Text] = []
    passes: list[PassRecord] = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        records: list[PassRecord] = []
        chunks = engine.stream(prompt, config)
        try:
            for chunk in chunks:
                tokens += chunk.tokens
                if chunk.record is not None:
                    records.append(chunk.record)
                now = time.perf_counter()
                on_progress("Letting the target write texts", min((now - begun) / seconds, 1.0))
                if now > begun + seconds and len(tokens) >= _LEAST_TOKENS:
                    break
        finally:
            chunks.close()
        texts.append(Text(engine.encoder.encode(prompt), tokens))
        passes += records[1:]
        if time.perf_counter() > begun + seconds:
            break
    return WrittenTexts(texts, statistics.median([r.accept_s for r in passes] or [0.0]), passes)


@dataclass
class TreeStatistics:
    """Statistics of trees that were grown along known texts.

    Attributes:
        yields: what they yield; None if every text was too short.
        draft_s, steps, rows: totals over all drafts: seconds, decodes, and rows decoded.
    """

    yields: Yields | None = None
    draft_s: float = 0.0
    steps: int = 0
    rows: int = 0


def measure_trees(
    engine: Engine,
    config: GenerationConfig,
    texts: Sequence[Text],
    budget: int,
    seconds: float,
    on_progress: Progress,
) -> TreeStatistics:
    """Grow trees of a size along texts that the target wrote, as its passes would have done.

    The target writes the same text whatever drafts it, so its choices are known and only the drafter runs.
    Every text is walked through from its first token, then from its second, and so on, until the time is up.
    Walks through one text are alike, so their passes together have the weight of one walk.
    """
    meter, found = YieldMeter(), TreeStatistics()
    begun = time.perf_counter()
    limits = engine.limits
    limits = replace(limits, budget=min(budget, limits.budget), depth=min(limits.depth, _DEEPEST))
    longest = max((len(text.answer) for text in texts), default=0)
    for start in range(longest):
        for text in texts:
            if time.perf_counter() > begun + seconds and meter.passes:
                break
            _walk(engine, config, text, start, limits, meter, found)
            done = (time.perf_counter() - begun) / seconds
            on_progress(f"Measuring trees of {limits.budget} nodes", min(done, 1.0))
    if (yields := meter.yields()) is not None:
        once = sum(len(text.answer) for text in texts) / yields.at(limits.budget)
        found.yields = replace(yields, passes=min(yields.passes, max(round(once), 1)))
    return found


def _walk(
    engine: Engine,
    config: GenerationConfig,
    text: Text,
    start: int,
    limits: TreeLimits,
    meter: YieldMeter,
    found: TreeStatistics,
) -> None:
    """One walk through a text. What is learned on the way is discarded, because the text will come again."""
    n_vocab = engine.target.model.vocabulary.n_tokens
    policy = tree_policy(engine.policy.name)
    method = method_for(config, n_vocab, config.seed or 0, engine.drafter, policy=policy)
    tokens = text.prompt + text.answer
    place = len(text.prompt) + start
    first = True
    # If the text ended before a path could, the length of that path would not be known.
    while place + limits.depth + 1 < len(tokens):
        begun = time.perf_counter()
        tree = method.drafting.draft(engine.drafter, tokens[: place + 1], limits).tree
        taken = time.perf_counter() - begun
        path = [0]
        while (child := tree.child(path[-1], tokens[place + len(path)])) is not None:
            path.append(child)
        meter.add(tree, path, tokens[place + len(path)], engine.drafter.steps, engine.drafter.rows)
        if not first:  # the first draft also reads the text up to here
            found.draft_s += taken
            found.steps += engine.drafter.steps
            found.rows += engine.drafter.rows
        first = False
        place += len(path)


def _time_passes(
    target: Target,
    rows: Sequence[int],
    timed: TimingSamples,
    whole: TimingSamples,
    rounds: int,
    seconds: float,
    on_progress: Progress = lambda _what, _fraction: None,
) -> None:
    """Time passes of these sizes in turn, until the time is up; always times one pass of one row.

    Args:
        timed: gets the seconds without those spent waiting for the disk.
        whole: gets all the seconds.
    """
    ends = time.perf_counter() + seconds
    tokens = (
        np.random.default_rng(0).integers(0, target.model.vocabulary.n_tokens, _TEXT + max(rows)).tolist()
    )
    try:
        time_pass(target, tokens, 1)  # the first one of all is slower
        for turn in range(rounds):
            for number, size in enumerate(rows):
                if timed.seconds and time.perf_counter() + _expected(whole, size) > ends:
                    return
                taken, waited = time_pass(target, tokens, size)
                timed.add(size, max(taken - waited, 0.0))
                whole.add(size, taken)
                on_progress("Measuring passes", (turn + (number + 1) / len(rows)) / rounds)
    finally:
        target.rewind(0)


def _expected(whole: TimingSamples, size: int) -> float:
    """Roughly how many seconds a pass of this size will take, judging by those that were timed.

    A tree takes about as long as the largest size so far; longer pieces of prompts take time by their rows.
    """
    if size in whole.seconds:
        return whole.seconds[size][0]
    largest = max(whole.seconds, default=0)
    rows = size / max(largest, MOST_ROWS)
    return whole.seconds[largest][0] * max(rows, 1.0) if largest else 0.0


def time_pass(target: Target, tokens: list[int], rows: int) -> tuple[float, float]:
    """Seconds of a pass, and how many of them were spent waiting for the disk.

    Args:
        tokens: the text before the rows, and then at least this many rows.
    """
    text = tokens[:_TEXT]
    target.prefill(text)
    waited = target.context.waited_s
    begun = time.perf_counter()
    if rows <= target.max_nodes:
        trees = [TextTree(tokens[:_TEXT], TokenTree.chain(tokens[_TEXT - 1 : _TEXT - 1 + rows]))]
        target.verify(trees)
        taken = time.perf_counter() - begun
        target.commit(trees, [[0]])
    else:  # only prompts are read in pieces this long
        target.prefill(tokens[: _TEXT + rows])
        taken = time.perf_counter() - begun
    waited = target.context.waited_s - waited
    target.rewind(_TEXT)
    return taken, waited


def _profile(target: Target, timed: TimingSamples, whole: TimingSamples, read_rate: float) -> PassProfile:
    """The profile that these passes give."""
    n_bytes = target.model.weights.streamed_bytes
    overlap = USUAL_OVERLAP
    if read_rate:
        overlap = fitted_overlap(timed.curve(), whole.curve(), read_seconds(n_bytes, read_rate))
    return PassProfile(
        timed.curve(),
        timed.spread,
        streamed=n_bytes > 0,
        read_rate=read_rate,
        overlap=overlap,
        weight_bytes=target.model.n_bytes,
        parameters=target.model.n_parameters,
    )


def _most_rows(target: Target) -> int:
    room = target.context.n_cells - 2 * _TEXT
    return min(max(target.prompt_rows, target.max_nodes), room)


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle if middle > 0 else 0.0
