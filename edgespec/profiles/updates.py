"""Profile updates: what a run measures of its pair corrects the stored profile for the next run.

A profile is measured in a minute from little text, and of a disk whose speed may differ tomorrow. Runs have
more evidence, so they move its figures, and longer runs move them further.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from edgespec.costs.pass_time import USUAL_OVERLAP, read_seconds_within
from edgespec.costs.yields import BUDGETS, TreeYields
from edgespec.generation.expert_use import ExpertUse
from edgespec.generation.result import PassRecord
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.machine.contention import ContentionWatch
from edgespec.profiles.store import (
    ExpertProfile,
    PassProfile,
    ProfileKeys,
    ProfileStore,
    disk_key,
)
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.sizing.yield_meter import YieldMeter, accepted_by_budget
from edgespec.speculation.tree import TokenTree

_ENOUGH_PASSES = 4  # streamed passes that it takes to measure the disk's speed
_ENOUGH_EXPERTS = 5_000  # that passes needed, to say how often experts are in memory
_FAR = 1.5  # times the largest size of a profile, from which a size becomes a point of its own
_PROFILE_WEIGHT = 8  # weight of a quick profile, in passes of a run
_MAX_PASSES = 1000  # of each size, the latest: a server may run for months
_ENOUGH_TREES = 12  # that say what trees of a pair yield, if nothing else does
_LARGE_TREE = 12  # nodes
_UNMARKED = 24  # passes after which a corrected profile no longer counts as disturbed


class _TreeTally:
    """Compares passes with trees to what the profile expected of them.

    Attributes:
        passes: how many there were.
    """

    def __init__(self, yields: TreeYields) -> None:
        self.passes = 0
        self._yields = yields
        self._expected = np.array([yields.at(budget) - 1 for budget in BUDGETS])
        self._accepted = np.zeros(len(BUDGETS))
        self._steps = self._expected_steps = 0.0

    def add(self, tree: TokenTree, path: Sequence[int], steps: int) -> None:
        """Count a pass; it is evidence for smaller trees directly, and for larger ones in proportion."""
        accepted = accepted_by_budget(tree, path) - 1.0
        expected = self._yields.at(len(tree)) - 1
        if expected > 0:
            larger = np.array(BUDGETS) > len(tree)
            accepted[larger] *= self._expected[larger] / expected
        self.passes += 1
        self._accepted += accepted
        self._steps += steps
        self._expected_steps += self._yields.steps_at(len(tree))

    @property
    def steps(self) -> float:
        """Draft steps, relative to those expected."""
        return self._steps / self._expected_steps if self._expected_steps > 0 else 1.0

    @property
    def ratios(self) -> dict[int, float]:
        """Accepted drafted tokens by budget, relative to those expected."""
        expected = self.passes * self._expected
        ratios = np.divide(self._accepted, expected, out=np.ones(len(BUDGETS)), where=expected > 0)
        return dict(zip(BUDGETS, ratios.tolist(), strict=True))


class _FirstTrees:
    """The trees of a pair whose yields were not measured yet."""

    def __init__(self) -> None:
        self._meter = YieldMeter()
        self._sizes: deque[int] = deque(maxlen=_MAX_PASSES)

    def add(self, tree: TokenTree, path: Sequence[int], record: PassRecord) -> None:
        """Count a pass."""
        self._sizes.append(len(tree))
        self._meter.add(tree, path, -1, record.draft_steps, record.draft_rows)

    def yields(self) -> TreeYields | None:
        """Return their yields; None if they were few, or so small that they say nothing of larger ones.

        Trees differ in size where nodes cost time, and are larger where more is accepted. So nothing is said
        of sizes that a good part of them did not have.
        """
        found = self._meter.yields()
        if found is None or found.passes < _ENOUGH_TREES:
            return None
        usual = int(np.quantile(self._sizes, 0.25))
        if usual < _LARGE_TREE:
            return None
        tokens = {budget: mean for budget, mean in found.tokens.items() if budget <= usual}
        ((_, steps),), ((_, rows),) = found.steps.items(), found.rows.items()
        return replace(found, tokens=tokens, steps={usual: steps}, rows={usual: rows}, by_rank=())


def corrected_passes(profile: PassProfile, seconds: Mapping[int, Sequence[float]]) -> PassProfile:
    """A quick or disturbed profile, corrected by what passes took in a run.

    Whatever disturbed the profile slowed passes of every size. So the whole curve is scaled first, by all the
    passes of the run, and then moved towards the measurements at each size.

    Args:
        seconds: seconds of arithmetic of each pass, by rows.
    """
    curve = profile.compute
    medians = [
        (rows, statistics.median(times), len(times)) for rows, times in sorted(seconds.items()) if times
    ]
    count = sum(n for _, _, n in medians)
    logs = [n * math.log(s / curve.at(rows)) for rows, s, n in medians if s > 0 and curve.at(rows) > 0]
    if not logs:
        return profile
    if medians[-1][0] >= _FAR * curve.rows[-1]:
        curve = curve.reaching(medians[-1][0])
    curve = curve.scaled(math.exp(sum(logs) / count * count / (count + _PROFILE_WEIGHT)))
    for rows, s, n in medians:
        curve = curve.moved(rows, s, n / (n + _PROFILE_WEIGHT))
    if profile.disturbed and count >= _UNMARKED:
        return replace(profile, compute=curve, busy=0.0, spread=())
    return replace(profile, compute=curve)


@dataclass(frozen=True)
class _StreamedPass:
    """A pass over streamed weights."""

    pass_s: float  # its seconds
    wait_s: float  # those that it waited for weights
    ahead_s: float  # seconds before it during which its first weights were read


def arriving_rate(passes: Iterable[_StreamedPass], streamed_bytes: int, overlap: float) -> float | None:
    """Bytes that arrive per second, as a prediction of these passes has to assume: a median.

    While the processor computes, readers get less of it, so that a count of bytes and seconds shows a slower
    disk than passes of few rows find. Predictions regard that by the overlap, so it is taken out here.

    Returns:
        None if too few passes waited for the disk.
    """
    seconds = [
        read_s + each.ahead_s
        for each in passes
        if (read_s := read_seconds_within(each.pass_s, each.pass_s - each.wait_s, overlap)) is not None
    ]
    return streamed_bytes / statistics.median(seconds) if len(seconds) >= _ENOUGH_PASSES else None


class ProfileUpdates:
    """Collects the passes of one engine, and corrects the stored profile with them.

    Args:
        keys: the keys of the pair's profile; None stores nothing.
    """

    def __init__(self, keys: ProfileKeys | None, store: ProfileStore) -> None:
        self._keys = keys
        self._store = store
        self._tallies: dict[float, _TreeTally | None] = {}
        self._meters: dict[bool, _FirstTrees] = {}  # of pairs whose yields are not known, by whether sampled
        self._seconds: dict[int, deque[float]] = {}
        self._streamed: deque[_StreamedPass] = deque(maxlen=_MAX_PASSES)
        self._experts = ExpertUse()
        self._watch: ContentionWatch | None = None

    def add_pass(self, record: PassRecord, threads: int) -> None:
        """Count the time of a pass.

        Args:
            threads: how many threads computed it.
        """
        self._experts += record.experts or ExpertUse()
        if record.wait_s and record.experts is None:
            self._streamed.append(
                _StreamedPass(record.verify_s - record.setup_s, record.wait_s, record.draft_read_s)
            )
        if record.prompt_rows:
            return
        if self._watch is None:
            self._watch = ContentionWatch(threads)  # too late for the pass that is already over
            return
        latest = self._seconds.setdefault(record.nodes, deque(maxlen=_MAX_PASSES))
        latest.append(max(record.verify_s - record.wait_s - record.setup_s, 0.0))

    def add_tree(self, tree: TokenTree, path: Sequence[int], record: PassRecord, temperature: float) -> None:
        """Count the accepted path of a tree, for a text that was sampled at this temperature.

        Args:
            path: the accepted nodes of the tree.
            record: of the pass.
        """
        if len(tree) < 2 or self._keys is None:
            return
        if temperature not in self._tallies:
            yields = self._store.yields_at(self._keys, temperature)
            self._tallies[temperature] = _TreeTally(yields) if yields is not None else None
        if (tally := self._tallies[temperature]) is not None:
            tally.add(tree, path, record.draft_steps)
        else:
            self._meters.setdefault(temperature > 0, _FirstTrees()).add(tree, path, record)

    def forget(self) -> None:
        """Forget all passes, for example because a new profile already contains them."""
        self._tallies.clear()
        self._meters.clear()
        self._seconds.clear()
        self._streamed.clear()
        self._experts = ExpertUse()
        self._watch = None

    def save(self, weights: WeightStore) -> None:
        """Correct the stored profile by the passes of this run, and start over."""
        if self._keys is None:
            return
        self._save_rate(weights, self._keys)
        self._save_experts(weights, self._keys)
        self._save_seconds(self._keys)
        for sampled, trees in self._meters.items():
            if (yields := trees.yields()) is not None:
                self._store.put(self._keys.yields(float(sampled)), yields)
        for temperature, tally in self._tallies.items():
            key = self._keys.yields(temperature)
            known = self._store.yields(key)
            if tally is not None and known is not None:
                self._store.put(key, known.corrected(tally.ratios, tally.passes, tally.steps))
        self.forget()

    def _save_experts(self, weights: WeightStore, keys: ProfileKeys) -> None:
        if self._experts.hits + self._experts.misses < _ENOUGH_EXPERTS:
            return
        self._store.put_experts(keys.target, ExpertProfile(weights.experts_held, self._experts.hit_rate))

    def _save_seconds(self, keys: ProfileKeys) -> None:
        """Correct a quick or disturbed pass profile by what this run's passes took."""
        passes = self._store.passes(keys.passes)
        if passes is None or not (passes.quick or passes.disturbed) or not self._seconds:
            return
        if self._watch is not None and self._watch.disturbed:
            return  # this run was disturbed too
        self._store.put(keys.passes, corrected_passes(passes, self._seconds))

    def _save_rate(self, weights: WeightStore, keys: ProfileKeys) -> None:
        """Store how fast weights arrived: with the passes of this model, and for others on the same disk."""
        arriving = StreamRate(weights, since_loading=True)
        if arriving.n_bytes < _ENOUGH_PASSES * weights.streamed_bytes or not arriving.n_bytes:
            return
        passes = self._store.passes(keys.passes)
        overlap = USUAL_OVERLAP if passes is None else passes.overlap
        rate = arriving_rate(self._streamed, weights.streamed_bytes, overlap) or arriving.rate
        if passes is not None:
            disks = len(weights.disk_rates) or 1
            self._store.put(keys.passes, replace(passes, read_rate=rate, disks=disks))
        for path, found in (weights.disk_rates or {weights.paths[0]: rate}).items():
            with suppress(OSError):  # the file is gone
                if found > 0:
                    self._store.put_streamed_rate(disk_key(path), found)
