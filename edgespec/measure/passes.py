"""Timing passes of the target.

The quick profile of a new model takes a few passes before its first answer. The full profile measures every
size several times, in turns, so that a disturbance affects all sizes alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.base.progress import Progress, no_progress
from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP, fitted_overlap, read_seconds
from edgespec.engine.sequence import SequenceTree, TextSequence
from edgespec.engine.target import Target
from edgespec.llama.first_layers import FirstLayers
from edgespec.llama.row_rule import FEW_PASSES
from edgespec.machine.contention import ContentionWatch
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.profiles.store import PassProfile
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.tree import TokenTree

ROUNDS = 7  # measurements of each size for a full profile
_TEXT = 32  # tokens before the rows that are timed
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
_FEW_ROWS = (1, 4, 8, 16, 32, 56, 128, 512)  # if there is no time for several passes of each size
_LEAST_ARITHMETIC = 0.01  # share of a pass: what waits for a busy disk leave cannot be less
_LEAST_SIZES = 2  # of a full profile: one size alone does not say what more rows cost


@dataclass
class TimingSamples:
    """Repeated timings by size, in seconds."""

    seconds: dict[int, list[float]] = field(default_factory=dict)

    def add(self, size: int, seconds: float) -> None:
        self.seconds.setdefault(size, []).append(seconds)

    def curve(self) -> Curve:
        """The curve through the medians."""
        return Curve.through((size, statistics.median(times)) for size, times in self.seconds.items())

    @property
    def spread(self) -> tuple[float, ...]:
        """Half the interquartile range relative to the median, for each size."""
        return tuple(_spread(self.seconds[size]) for size in sorted(self.seconds))


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle if middle > 0 else 0.0


def quick_passes(target: Target, seconds: float, derived: Callable[[], Curve]) -> PassProfile:
    """Measure a few passes, one or two of each size.

    Where that would take longer than `seconds`, only how fast weights arrive is measured, in a pass or two.

    Args:
        derived: gives seconds of arithmetic by rows, if passes take too long to be measured.

    Raises:
        DecodeAborted: stopped from outside.
        BackendError: as `derived`.
    """
    rows = [r for r in FEW_PASSES if r <= target.max_nodes]
    timed, whole, arriving = TimingSamples(), TimingSamples(), StreamRate(target.model.weights)
    watch = ContentionWatch(target.context.n_threads)
    _time_passes(target, rows[:1], timed, whole, 1, seconds)
    expected = whole.seconds[1][0] * 2 * len(rows)
    if expected > seconds:
        rate, busy = arriving.rate, watch.pressure  # deriving takes all the processor for a moment
        return replace(_profile(target, derived(), (), rate), quick=True, busy=busy)
    # Twice if there is time, because the spread shows whether something disturbed them.
    _time_passes(target, rows[1:], timed, whole, 2 if 2 * expected <= seconds else 1, math.inf)
    return replace(_timed_profile(target, timed, whole, arriving.rate), quick=True, busy=watch.pressure)


def passes_by_first_layers(target: Target, first_layers: FirstLayers) -> PassProfile | None:
    """Estimate passes by their first layers; None if the graph does not name these.

    The disk's speed is that of the layers read so far.

    Raises:
        DecodeAborted: stopped from outside.
    """
    watch = ContentionWatch(target.context.n_threads)
    untimed = [rows for rows in FEW_PASSES if rows not in first_layers.seconds]
    for rows in [*untimed, 1]:  # the first decode of all is slower
        if first_layers.decode(rows) is None:
            return None
    rate = StreamRate(target.model.weights, since_loading=True).rate
    profile = _profile(target, Curve.through(first_layers.seconds.items()), (), rate)
    return replace(profile, quick=True, busy=watch.pressure)


def measure_passes(target: Target, seconds: float, on_progress: Progress) -> tuple[PassProfile, bool]:
    """Measure the pass curve; also returns whether the machine was too busy, both times.

    Raises:
        DecodeAborted: stopped from outside.
    """
    whole = TimingSamples()
    _time_passes(target, [1], TimingSamples(), whole, 1, seconds)
    sizes = _ROWS if whole.seconds[1][0] * len(_ROWS) * ROUNDS < seconds / 2 else _FEW_ROWS
    rows = [r for r in sizes if r <= _max_rows(target) and (r <= target.max_nodes or target.reads_at_once(r))]
    for attempt in range(2):
        timed, whole, arriving = TimingSamples(), TimingSamples(), StreamRate(target.model.weights)
        watch = ContentionWatch(target.context.n_threads)
        _time_passes(target, rows, timed, whole, ROUNDS, seconds, on_progress, least=_LEAST_SIZES)
        profile = replace(_timed_profile(target, timed, whole, arriving.rate), busy=watch.pressure)
        if not profile.disturbed:
            break
        if attempt == 0:
            on_progress("The machine is busy with other things; measuring again", 0.0)
    return profile, profile.disturbed


def _time_passes(
    target: Target,
    rows: Sequence[int],
    timed: TimingSamples,
    whole: TimingSamples,
    rounds: int,
    seconds: float,
    on_progress: Progress = no_progress,
    *,
    least: int = 1,
) -> None:
    """Time passes of these sizes in turn, until the time is up.

    Args:
        timed: gets the seconds without those spent waiting for the disk.
        whole: gets all the seconds.
        least: sizes that are timed at least once, however long that takes.
    """
    ends = time.perf_counter() + seconds
    tokens = (
        np.random.default_rng(0).integers(0, target.model.vocabulary.n_tokens, _TEXT + max(rows)).tolist()
    )
    try:
        time_pass(target, tokens, 1)  # the first one of all is slower
        for turn in range(rounds):
            for number, size in enumerate(rows):
                if len(timed.seconds) >= least and time.perf_counter() + _expected(whole, size) > ends:
                    return
                taken, waited = time_pass(target, tokens, size)
                timed.add(size, taken - waited)
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
    rows = size / max(largest, USUAL_NODES)
    return whole.seconds[largest][0] * max(rows, 1.0) if largest else 0.0


def time_pass(target: Target, tokens: list[int], rows: int) -> tuple[float, float]:
    """Seconds of a pass behind another one, and how many of them were spent waiting for the disk.

    What is needed only once for a number of rows is left out. Behind a piece of a prompt, a pass of a small
    model takes twice as long as behind a pass of one row.

    Args:
        tokens: the text before the rows, and then at least this many rows.
    """
    text = TextSequence(tokens[: _TEXT + 1])
    target.prefill(text)
    if not target.model.weights.streamed_bytes:
        _pass(target, text, tokens, 1)
        target.rewind(_TEXT)
    waited, setup = target.context.waited_s, target.context.setup_s
    begun = time.perf_counter()
    if rows <= target.max_nodes:
        taken = _pass(target, text, tokens, rows)
    else:  # only prompts are read in pieces this long
        target.prefill(TextSequence(tokens), _TEXT + rows)
        taken = time.perf_counter() - begun
    waited, setup = target.context.waited_s - waited, target.context.setup_s - setup
    target.rewind(_TEXT)
    taken = max(taken - setup, 0.0)
    return taken, min(waited, (1 - _LEAST_ARITHMETIC) * taken)


def _pass(target: Target, text: TextSequence, tokens: list[int], rows: int) -> float:
    """Seconds to verify a chain of so many rows behind the text."""
    begun = time.perf_counter()
    trees = [SequenceTree(text, TokenTree.chain(tokens[_TEXT : _TEXT + rows]))]
    target.verify(trees)
    taken = time.perf_counter() - begun
    target.commit(trees, [[0]])
    return taken


def _timed_profile(
    target: Target, timed: TimingSamples, whole: TimingSamples, read_rate: float
) -> PassProfile:
    """The profile that these passes give."""
    profile = _profile(target, timed.curve(), timed.spread, read_rate)
    if not read_rate:
        return profile
    read_s = read_seconds(target.model.weights.streamed_bytes, read_rate)
    return replace(profile, overlap=fitted_overlap(timed.curve(), whole.curve(), read_s))


def _profile(target: Target, compute: Curve, spread: tuple[float, ...], read_rate: float) -> PassProfile:
    return PassProfile(
        compute,
        spread,
        streamed=target.model.weights.streamed_bytes > 0,
        read_rate=read_rate,
        disks=len(target.model.weights.disk_rates) or 1,
        overlap=USUAL_OVERLAP,
        weight_bytes=target.model.n_bytes,
        parameters=target.model.n_parameters,
    )


def _max_rows(target: Target) -> int:
    room = target.context.n_cells - 2 * _TEXT
    return min(max(target.prompt_rows, target.max_nodes), room)
