"""What a run saw of the figures that its pair is planned with, kept for the next run.

A profile is made in a minute from little text, and of a disk that gives another speed tomorrow. Runs see
more: they move its figures, the more the longer they were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from edgespec.costs.yields import BUDGETS, Yields
from edgespec.generation.result import PassRecord
from edgespec.machine.contention import ContentionWatch
from edgespec.models.llama.runtime.residency import Residency
from edgespec.profiles.store import Keys, PassProfile, ProfileStore
from edgespec.profiles.stream_rate import StreamRate
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.yield_meter import accepted_by_budget

_ENOUGH_PASSES = 4  # whose bytes tell how fast the disk is
_PROFILE_WEIGHT = 8  # passes of a run that count as much as a profile made in a hurry
_UNMARKED = 24  # passes after which a disturbed profile is as good as another


class _TreeTally:
    """Passes with trees, against what a profile expected of them.

    Attributes:
        passes: how many.
    """

    def __init__(self, yields: Yields) -> None:
        self.passes = 0
        self._yields = yields
        self._expected = np.array([yields.at(budget) - 1 for budget in BUDGETS])
        self._accepted = np.zeros(len(BUDGETS))
        self._steps = self._expected_steps = 0.0

    def add(self, tree: TokenTree, path: Sequence[int], steps: int) -> None:
        """Count a pass: what it accepted tells of smaller trees too, and of larger ones by proportion."""
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
        """Draft steps over what was expected."""
        return self._steps / self._expected_steps if self._expected_steps > 0 else 1.0

    @property
    def ratios(self) -> dict[int, float]:
        """Accepted over expected, by budget."""
        expected = self.passes * self._expected
        ratios = np.divide(self._accepted, expected, out=np.ones(len(BUDGETS)), where=expected > 0)
        return dict(zip(BUDGETS, ratios.tolist(), strict=True))


def corrected_passes(profile: PassProfile, seconds: Mapping[int, Sequence[float]]) -> PassProfile:
    """A profile of little weight, moved to what passes were seen to take.

    What disturbed a profile slowed passes of every size. So the whole curve is scaled first, by the passes
    that were seen, and then drawn to each size.

    Args:
        seconds: of arithmetic of each pass, by rows.
    """
    curve = profile.compute
    seen = [(rows, statistics.median(times), len(times)) for rows, times in sorted(seconds.items()) if times]
    count = sum(n for _, _, n in seen)
    logs = [n * math.log(s / curve.at(rows)) for rows, s, n in seen if s > 0 and curve.at(rows) > 0]
    if not logs:
        return profile
    curve = curve.scaled(math.exp(sum(logs) / count * count / (count + _PROFILE_WEIGHT)))
    for rows, s, n in seen:
        curve = curve.moved(rows, s, n / (n + _PROFILE_WEIGHT))
    if profile.disturbed and count >= _UNMARKED:
        return replace(profile, compute=curve, busy=0.0, spread=())
    return replace(profile, compute=curve)


class ProfileUpdates:
    """The passes of one engine.

    Args:
        keys: what the pair's figures are kept under; None keeps nothing.
    """

    def __init__(self, keys: Keys | None, store: ProfileStore | None = None) -> None:
        self._keys = keys
        self._store = store or ProfileStore()
        self._tallies: dict[float, _TreeTally | None] = {}
        self._seconds: dict[int, list[float]] = {}
        self._watch: ContentionWatch | None = None

    def add_pass(self, record: PassRecord, threads: int) -> None:
        """Count what a pass took.

        Args:
            threads: that computed it.
        """
        if self._watch is None:
            self._watch = ContentionWatch(threads)  # the pass that is being told of is over
            return
        self._seconds.setdefault(record.nodes, []).append(max(record.verify_s - record.wait_s, 0.0))

    def add_tree(self, tree: TokenTree, path: Sequence[int], steps: int, temperature: float) -> None:
        """Count a pass of a text that was sampled at this temperature.

        Args:
            path: of the tree, what was accepted.
            steps: draft steps that the tree took.
        """
        if len(tree) < 2 or self._keys is None:
            return
        if temperature not in self._tallies:
            yields = self._store.yields_at(self._keys, temperature)
            self._tallies[temperature] = _TreeTally(yields) if yields is not None else None
        if (tally := self._tallies[temperature]) is not None:
            tally.add(tree, path, steps)

    def forget(self) -> None:
        """Begin anew, as with a profile that was just made from these passes."""
        self._tallies.clear()
        self._seconds.clear()
        self._watch = None

    def keep(self, weights: Residency) -> None:
        """Move what is kept towards what was seen."""
        if self._keys is None:
            return
        self._keep_rate(weights, self._keys)
        self._keep_seconds(self._keys)
        for temperature, tally in self._tallies.items():
            key = self._keys.yields(temperature)
            known = self._store.yields(key)
            if tally is not None and known is not None:
                self._store.put(key, known.corrected(tally.ratios, tally.passes, tally.steps))
        self.forget()

    def _keep_seconds(self, keys: Keys) -> None:
        """Move passes that were measured in a hurry, or on a busy machine, to what this run's passes took."""
        passes = self._store.passes(keys.passes)
        if passes is None or not (passes.quick or passes.disturbed) or not self._seconds:
            return
        if self._watch is not None and self._watch.disturbed:
            return  # this run is no better
        self._store.put(keys.passes, corrected_passes(passes, self._seconds))

    def _keep_rate(self, weights: Residency, keys: Keys) -> None:
        arriving = StreamRate(weights, since_loading=True)
        if arriving.n_bytes < _ENOUGH_PASSES * weights.streamed_bytes or not arriving.n_bytes:
            return
        passes = self._store.passes(keys.passes)
        if passes is not None:
            self._store.put(keys.passes, replace(passes, read_rate=arriving.rate))
