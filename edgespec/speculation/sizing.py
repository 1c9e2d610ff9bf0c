"""How large the next tree should be.

A node is worth adding while its chance of acceptance, in tokens, times the time a token takes by now exceeds
what the node costs; a draft step is worth it while the tokens that it could add are worth more than its
seconds (the threshold of OPT-Tree, Wang et al. 2024, from measured times). The chances are the policy's,
corrected by how many tokens its trees promised and how many were accepted. Where passes cost the same for one
node as for many, large trees follow; where every node costs, small ones; where draft steps are dear, shallow
ones. Where speculation does not pay, none: what trying costs is kept to a small share of all time.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.costs.pass_time import Costs
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.running_costs import FadingLine, MovingCurve, StepCosts

_FIRST_BUDGET = 16  # before anything is known
_MEMORY = 0.9  # weight of the past in a running mean, per pass
_TRUST_MEMORY = 0.95  # the same, for how far the drafter's probabilities can be believed
_TRUST_PRIOR = 2.0  # tokens that stand for taking the drafter at its word
_PATIENCE = 4  # rounds with a tree before their mean is judged
_MOST_GAIN = 0.9  # never ask for more of a step: the first one tells what drafting is good for
_DEAREST_TRIAL = 1.5  # plain passes that one trial may lose
_LOST_SHARE = 0.015  # of all time, that trials may have lost before there is another
_MOST_CREDIT = 4.0  # plain passes that gains may pay for
_FADE = 0.999  # of what was lost and spent, per pass: texts change


class FixedSizer:
    """Always the same budget."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits

    def limits(self) -> TreeLimits:
        """What the next tree may cost."""
        return self._limits

    def record(self, record: PassRecord) -> None:
        """Learn from a pass: nothing to learn."""


class AdaptiveSizer:
    """Follows the measured cost of nodes and the measured yield of trees.

    Args:
        most: what no tree may exceed.
        costs: what passes and draft steps were measured to take; None finds out.
    """

    def __init__(self, most: TreeLimits, costs: Costs | None = None) -> None:
        self._most = most
        self._cost = MovingCurve(costs.verify, most.budget) if costs else FadingLine()
        self._plain_s = costs.verify.at(1) if costs else None  # seconds of a pass over the root alone
        self._steps = StepCosts(costs.step_s if costs else None, costs.row_s if costs else 0.0)
        self._trial = _Trial()
        self._pausing = False
        self._lost_s = self._spent_s = 0.0
        self._promised = self._kept = 0.0  # fading sums of tokens

    def limits(self) -> TreeLimits:
        """What the next tree may cost; a budget of 1 means plain decoding."""
        if self._plain_s is None or self._pausing:
            return self._replace(budget=1)
        per_node = self._cost.slope
        if per_node is None:
            return self._replace(budget=min(_FIRST_BUDGET, self._most.budget))
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
        # Steps are priced by themselves where they are known; elsewhere they are part of what nodes cost.
        self._cost.add(record.nodes, seconds - record.draft_s if record.draft_steps else seconds)
        if record.draft_steps:
            self._steps.add(record)
        self._promised = _TRUST_MEMORY * self._promised + record.promised
        self._kept = _TRUST_MEMORY * self._kept + (record.accepted if record.promised else 0)
        self._lost_s *= _FADE
        self._spent_s = _FADE * self._spent_s + seconds
        if record.nodes == 1:
            # The shortest is the least disturbed by other programs, and a pass only gets dearer slowly.
            self._plain_s = min(seconds, 1.05 * (self._plain_s or math.inf))
            if record.draft_s < 0.01 * seconds:
                self._pausing = self._pausing and self._lost_s > _LOST_SHARE * self._spent_s
                return
        if self._plain_s is None:
            return
        self._trial.add(record, seconds - self._steps.reading(record), self._plain_s)
        if self._trial.failed(self._plain_s):
            # What was gained before pays for trying again soon, within bounds, as texts change.
            self._lost_s = max(self._lost_s + self._trial.net_s, -_MOST_CREDIT * self._plain_s)
            self._trial = _Trial()
            self._pausing = True

    def _replace(self, budget: int) -> TreeLimits:
        return replace(self._most, budget=budget)


class _Trial:
    """Rounds with drafts in a row, for as long as they pay.

    Attributes:
        rounds: how many.
        lost_s: seconds by which the latest of them took longer than plain decoding would have.
        net_s: the same of all of them; negative if they gained.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.lost_s = self.net_s = 0.0
        self._seconds = self._tokens = 0.0

    @property
    def pace(self) -> float:
        """Seconds a token by now."""
        return self._seconds / self._tokens

    def add(self, record: PassRecord, seconds: float, plain_s: float) -> None:
        tokens = record.accepted + 1
        self.rounds += 1
        weight = max(1 / self.rounds, 1 - _MEMORY)
        self._seconds += weight * (seconds - self._seconds)
        self._tokens += weight * (tokens - self._tokens)
        # Gains are not saved up: a text that changes is noticed as soon. And the first round may have been
        # disturbed by whatever happens once.
        lost_s = seconds - tokens * plain_s
        self.net_s += lost_s
        self.lost_s = max(self.lost_s + (min(lost_s, plain_s) if self.rounds == 1 else lost_s), -plain_s)

    def failed(self, plain_s: float) -> bool:
        """Whether plain decoding is the better choice, as far as these rounds tell."""
        if self.rounds >= _PATIENCE and self.pace > plain_s:
            return True
        return self.rounds < _PATIENCE and self.lost_s > _DEAREST_TRIAL * plain_s
