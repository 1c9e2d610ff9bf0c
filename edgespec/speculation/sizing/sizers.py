"""Tree sizing: how large the next tree should be, from what nodes and draft steps cost and tokens are worth.

A node is worth adding while its acceptance probability times the time per token exceeds what the node
costs. A draft step is worth taking while the tokens it could add are worth more than its seconds (the
threshold of OPT-Tree, Wang et al. 2024, with measured times); steps during which the disk reads for the pass
are worth taking in any case, as long as passes wait for it. The probabilities are the policy's, corrected
by how many of the tokens its trees promised were accepted. Where a pass takes as
long for many nodes as for one, trees become large; where every node costs time, small; where draft steps are
expensive, shallow. Where speculation does not pay, decoding is plain, and the time lost on trials is limited
to a small share of the whole.

Texts that share a pass share its nodes: a further node is worth as much for one of several texts as for a
single one, but a token is worth less, because a plain pass already gives one for each text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgespec.costs.pass_time import Costs
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sizing.running_costs import FadingLine, MovingCurve, ReadAhead, StepCosts

FIRST_BUDGET = 16  # before anything is known
_MEMORY = 0.9  # weight of the past in a running mean, per pass
_TRUST_MEMORY = 0.95  # the same, for how reliable the drafter's probabilities are
_TRUST_PRIOR = 2.0  # tokens of prior evidence that those probabilities are right
_PATIENCE = 4  # rounds with a tree before their mean is judged
_MOST_GAIN = 0.9  # upper limit of the gain demanded of a step: the first shows whether drafting pays
_DEAREST_TRIAL = 1.5  # time that one trial may lose, in plain passes
_TRIAL_PASS = 0.3  # how much longer than a plain pass those of a trial may take, until it can be judged
_LOST_SHARE = 0.015  # share of all time that trials may have lost before the next one
_MOST_CREDIT = 4.0  # most time that earlier gains may offset, in plain passes
_FADE = 0.999  # of the time lost and spent, per pass, because texts change


class FixedSizer:
    """The same budget for every tree.

    Attributes:
        most: limits that no tree exceeds.
    """

    def __init__(self, most: TreeLimits) -> None:
        self.most = most

    def limits(self, texts: int = 1, room: PassRoom | None = None) -> TreeLimits:
        """Limits of the next trees; see AdaptiveSizer."""
        if room is None:
            return self.most
        budget = max(min(texts * self.most.budget, room.nodes), texts)
        return _within(self.most, budget, self.most.free, texts, room)

    def record(self, record: PassRecord, texts: int = 1, other_rows: int = 0) -> None:
        """Ignore the pass: the budget is fixed."""


@dataclass(frozen=True)
class PassRoom:
    """What a pass that is shared has left for trees.

    Attributes:
        nodes: most nodes of all trees together, their roots included.
        other_rows: rows that the pass has in any case.
    """

    nodes: int
    other_rows: int = 0


class AdaptiveSizer:
    """Follows the measured cost of nodes and the measured yield of trees.

    Args:
        most: limits that no tree may exceed.
        costs: measured times of passes and draft steps; None learns them while decoding.
        first: nodes of the first tree, where costs are learned while decoding.

    Attributes:
        most: the same.
    """

    def __init__(self, most: TreeLimits, costs: Costs | None = None, first: int = FIRST_BUDGET) -> None:
        self.most = most
        self._first = first
        self._costs = costs
        self._cost = MovingCurve(costs.verify, most.budget) if costs else FadingLine()
        self._steps = StepCosts(costs.step_s if costs else None, costs.row_s if costs else 0.0)
        self._ahead = ReadAhead()
        self._judgements: dict[int, _Judgement] = {}
        self._promised = self._kept = 0.0  # fading sums of tokens

    def limits(self, texts: int = 1, room: PassRoom | None = None) -> TreeLimits:
        """Limits of the next tree; as many nodes as texts mean plain decoding.

        Args:
            texts: how many trees share the pass; the limits are those of all together.
            room: what the pass has left for them; None for all of it.
        """
        judgement = self._judgement(texts)
        most = self.most.budget if room is None else max(room.nodes, texts)
        if judgement.plain_s is None or judgement.pausing:
            return replace(self.most, budget=texts)
        per_node = self._cost.slope
        if per_node is None:
            return replace(self.most, budget=min(self._first * texts, most))
        if judgement.on_trial:
            # A single large tree that fails would end the trial, whatever smaller ones would yield.
            most = min(most, max(self._cost.nodes_within(texts, _TRIAL_PASS), texts + 1))
        trust = (self._kept + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR)
        worth = judgement.token_s(texts) * trust  # seconds that a promised token saves
        chance = min(max(per_node / worth, 1e-6), 1.0)
        # The first step is always taken: it shows whether drafting pays.
        gain, row_gain = min(self._steps.step_s / worth, _MOST_GAIN * texts), self._steps.row_s / worth
        return replace(
            _within(self.most, most, max(self._cost.free, self.most.free), texts, room),
            min_logprob=math.log(chance),
            min_gain=gain,
            row_gain=row_gain,
            hidden_gain=self._ahead.seconds / worth,
        )

    def record(self, record: PassRecord, texts: int = 1, other_rows: int = 0) -> None:
        """Learn from a pass.

        Args:
            record: of all trees together.
            other_rows: rows that were no nodes.
        """
        seconds, judgement = record.recurring_s, self._judgement(texts)
        # Draft steps that are counted have a cost of their own; others are part of the nodes' cost.
        rows = record.nodes + other_rows
        self._cost.add(rows, seconds - record.draft_s if record.draft_steps else seconds)
        if record.draft_steps:
            self._steps.add(record)
            self._ahead.add(record)
        self._promised = _TRUST_MEMORY * self._promised + record.promised
        self._kept = _TRUST_MEMORY * self._kept + (record.accepted if record.promised else 0)
        if not other_rows:  # what these take would count against the trees
            judgement.add(record, texts, seconds - self._steps.reading(record))

    def _judgement(self, texts: int) -> _Judgement:
        """The judgement of drafting for about as many texts."""
        kind = texts.bit_length()
        if kind not in self._judgements:
            plain_s = self._costs.verify.at(texts) if self._costs else None
            self._judgements[kind] = _Judgement(plain_s)
        return self._judgements[kind]


def _within(most: TreeLimits, budget: int, free: int, texts: int, room: PassRoom | None) -> TreeLimits:
    """Limits of trees that share a pass with each other and with other rows."""
    if room is None:
        return replace(most, budget=budget, free=min(free, budget))
    free = min(max(free - room.other_rows, texts), budget)
    return replace(most, budget=budget, free=free, rows=1 if room.other_rows else most.rows)


class _Judgement:
    """Whether drafting pays, judged by the rounds so far.

    Attributes:
        plain_s: seconds of a pass without drafted nodes; None before the first.
        pausing: whether nothing is drafted for now.
    """

    def __init__(self, plain_s: float | None) -> None:
        self.plain_s = plain_s
        self.pausing = False
        self._trial = _Trial()
        self._lost_s = self._spent_s = 0.0

    @property
    def on_trial(self) -> bool:
        """Whether there were too few rounds with drafts to judge them by their mean."""
        return self._trial.is_short

    def token_s(self, texts: int) -> float:
        """Seconds a token takes, by the better of both ways."""
        assert self.plain_s is not None
        plain = self.plain_s / texts
        return plain if self.on_trial else min(plain, self._trial.pace)

    def add(self, record: PassRecord, texts: int, drafted_s: float) -> None:
        """Learn from a round.

        Args:
            drafted_s: its seconds, without what was spent on reading text that was new to the drafter.
        """
        seconds = record.recurring_s
        self._lost_s *= _FADE
        self._spent_s = _FADE * self._spent_s + seconds
        if record.nodes == texts:
            # The shortest pass is the least disturbed by other programs; passes slow down only gradually.
            self.plain_s = min(record.target_s, 1.05 * (self.plain_s or math.inf))
            if record.draft_s < 0.01 * seconds:
                self.pausing = self.pausing and self._lost_s > _LOST_SHARE * self._spent_s
                return
        if self.plain_s is None:
            return
        self._trial.add(record.accepted + texts, drafted_s, self.plain_s, texts)
        if self._trial.failed(self.plain_s, texts):
            # Earlier gains allow the next trial to come sooner, within limits, because texts change.
            self._lost_s = max(self._lost_s + self._trial.net_s, -_MOST_CREDIT * self.plain_s)
            self._trial = _Trial()
            self.pausing = True


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
    def is_short(self) -> bool:
        """Whether there were too few to judge them by their mean."""
        return self.rounds < _PATIENCE

    @property
    def pace(self) -> float:
        """Seconds per token, as a running mean."""
        return self._seconds / self._tokens

    def add(self, tokens: int, seconds: float, plain_s: float, texts: int) -> None:
        """Add a round.

        Args:
            plain_s: seconds of a pass without drafts, which gives each text a token.
        """
        self.rounds += 1
        weight = max(1 / self.rounds, 1 - _MEMORY)
        self._seconds += weight * (seconds - self._seconds)
        self._tokens += weight * (tokens - self._tokens)
        # Gains do not accumulate, so that a change of the text is noticed as soon as ever. The first round's
        # loss is capped, because it may have been disturbed by something that happens only once.
        lost_s = seconds - tokens * plain_s / texts
        self.net_s += lost_s
        self.lost_s = max(self.lost_s + (min(lost_s, plain_s) if self.rounds == 1 else lost_s), -plain_s)

    def failed(self, plain_s: float, texts: int) -> bool:
        """Whether plain decoding is the better choice, judging by these rounds."""
        return self.lost_s > _DEAREST_TRIAL * plain_s if self.is_short else self.pace > plain_s / texts
