"""Tree sizing: how large the next tree should be, from what nodes and draft steps cost and tokens are worth.

A node is worth adding while its acceptance probability times the time per token exceeds what the node
costs. A draft step is worth taking while the tokens it could add are worth more than its seconds (the
threshold of OPT-Tree, Wang et al. 2024, with measured times). The probabilities are the policy's, corrected
by how many of the tokens its trees promised were accepted. Where a pass takes as
long for many nodes as for one, trees become large; where every node costs time, small; where draft steps are
expensive, shallow. Where speculation does not pay, decoding is plain, and the time lost on trials is limited
to a small share of the whole.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.costs.pass_time import Costs
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.running_costs import FadingLine, MovingCurve, StepCosts

FIRST_BUDGET = 16  # before anything is known
_MEMORY = 0.9  # weight of the past in a running mean, per pass
_TRUST_MEMORY = 0.95  # the same, for how reliable the drafter's probabilities are
_TRUST_PRIOR = 2.0  # tokens of prior evidence that those probabilities are right
_PATIENCE = 4  # rounds with a tree before their mean is judged
_MOST_GAIN = 0.9  # upper limit of the gain demanded of a step: the first shows whether drafting pays
_DEAREST_TRIAL = 1.5  # time that one trial may lose, in plain passes
_LOST_SHARE = 0.015  # share of all time that trials may have lost before the next one
_MOST_CREDIT = 4.0  # most time that earlier gains may offset, in plain passes
_FADE = 0.999  # of the time lost and spent, per pass, because texts change


class FixedSizer:
    """The same budget for every tree."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits

    def limits(self) -> TreeLimits:
        """Limits of the next tree."""
        return self._limits

    def record(self, record: PassRecord) -> None:
        """Ignore the pass: the budget is fixed."""


class AdaptiveSizer:
    """Follows the measured cost of nodes and the measured yield of trees.

    Args:
        most: limits that no tree may exceed.
        costs: measured times of passes and draft steps; None learns them while decoding.
        first: nodes of the first tree, where costs are learned while decoding.
    """

    def __init__(self, most: TreeLimits, costs: Costs | None = None, first: int = FIRST_BUDGET) -> None:
        self._most = most
        self._first = first
        self._cost = MovingCurve(costs.verify, most.budget) if costs else FadingLine()
        self._plain_s = costs.verify.at(1) if costs else None  # seconds of a pass over the root alone
        self._steps = StepCosts(costs.step_s if costs else None, costs.row_s if costs else 0.0)
        self._trial = _Trial()
        self._pausing = False
        self._lost_s = self._spent_s = 0.0
        self._promised = self._kept = 0.0  # fading sums of tokens

    def limits(self) -> TreeLimits:
        """Limits of the next tree; a budget of 1 means plain decoding."""
        if self._plain_s is None or self._pausing:
            return self._replace(budget=1)
        per_node = self._cost.slope
        if per_node is None:
            return self._replace(budget=min(self._first, self._most.budget))
        per_token = self._plain_s
        if self._trial.rounds >= _PATIENCE:
            per_token = min(per_token, self._trial.pace)
        trust = (self._kept + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR)
        worth = per_token * trust  # seconds that a promised token saves
        chance = min(max(per_node / worth, 1e-6), 1.0)
        gain, row_gain = min(self._steps.step_s / worth, _MOST_GAIN), self._steps.row_s / worth
        return replace(
            self._most,
            min_logprob=math.log(chance),
            free=min(max(self._cost.free, self._most.free), self._most.budget),
            min_gain=gain,
            row_gain=row_gain,
        )

    def record(self, record: PassRecord) -> None:
        """Learn from a pass."""
        seconds = record.seconds
        # Draft steps that are counted have a cost of their own; others are part of the nodes' cost.
        self._cost.add(record.nodes, seconds - record.draft_s if record.draft_steps else seconds)
        if record.draft_steps:
            self._steps.add(record)
        self._promised = _TRUST_MEMORY * self._promised + record.promised
        self._kept = _TRUST_MEMORY * self._kept + (record.accepted if record.promised else 0)
        self._lost_s *= _FADE
        self._spent_s = _FADE * self._spent_s + seconds
        if record.nodes == 1:
            # The shortest pass is the least disturbed by other programs; passes slow down only gradually.
            self._plain_s = min(seconds, 1.05 * (self._plain_s or math.inf))
            if record.draft_s < 0.01 * seconds:
                self._pausing = self._pausing and self._lost_s > _LOST_SHARE * self._spent_s
                return
        if self._plain_s is None:
            return
        self._trial.add(record, seconds - self._steps.reading(record), self._plain_s)
        if self._trial.failed(self._plain_s):
            # Earlier gains allow the next trial to come sooner, within limits, because texts change.
            self._lost_s = max(self._lost_s + self._trial.net_s, -_MOST_CREDIT * self._plain_s)
            self._trial = _Trial()
            self._pausing = True

    def _replace(self, budget: int) -> TreeLimits:
        return replace(self._most, budget=budget)


class _Trial:
    """Consecutive rounds with drafts, for as long as they pay.

    Attributes:
        rounds: how many there were.
        lost_s: seconds that the latest of them took beyond what plain decoding would have taken.
        net_s: the same over all of them; negative if they gained time.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.lost_s = self.net_s = 0.0
        self._seconds = self._tokens = 0.0

    @property
    def pace(self) -> float:
        """Seconds per token, as a running mean."""
        return self._seconds / self._tokens

    def add(self, record: PassRecord, seconds: float, plain_s: float) -> None:
        tokens = record.accepted + 1
        self.rounds += 1
        weight = max(1 / self.rounds, 1 - _MEMORY)
        self._seconds += weight * (seconds - self._seconds)
        self._tokens += weight * (tokens - self._tokens)
        # Gains do not accumulate, so that a change of the text is noticed as soon as ever. The first round's
        # loss is capped, because it may have been disturbed by something that happens only once.
        lost_s = seconds - tokens * plain_s
        self.net_s += lost_s
        self.lost_s = max(self.lost_s + (min(lost_s, plain_s) if self.rounds == 1 else lost_s), -plain_s)

    def failed(self, plain_s: float) -> bool:
        """Whether plain decoding is the better choice, judging by these rounds."""
        if self.rounds >= _PATIENCE and self.pace > plain_s:
            return True
        return self.rounds < _PATIENCE and self.lost_s > _DEAREST_TRIAL * plain_s
