"""Tree sizing: how large the next tree should be, from what nodes and draft steps cost and tokens are worth.

A node is worth adding while its acceptance probability times the time per token exceeds what the node
costs. A draft step is worth taking while the tokens it could add are worth more than its seconds (the
threshold of OPT-Tree, Wang et al. 2024, with measured times); steps during which the disk reads for the pass
are worth taking in any case, as long as passes wait for it. The probabilities are the policy's, corrected
by how many of the tokens its trees promised were accepted. Where a pass takes as long for many nodes as for
one, trees become large; where every node costs time, small; where draft steps are expensive, shallow. Where
speculation does not pay, decoding is plain: the time that it may lose is limited, to what it has gained and a
small share of the whole.

Sequences that share a pass share its nodes: a further node is worth as much for one of several sequences as
for a single one, but a token is worth less, because a plain pass already gives one for each sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgespec.costs.pass_time import RoundCosts, even_draft_seconds
from edgespec.costs.yields import BUDGETS, USUAL_AGREEMENT, TreeYields, expected_chain_yields, expected_yields
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sizing.running_costs import DecayedLinearFit, OnlineCostCurve, ReadAhead, StepCosts

FIRST_BUDGET = 16  # before anything is known
_MEMORY = 0.9  # weight of the past in a running mean, per pass
_TRUST_MEMORY = 0.95  # the same, for how reliable the drafter's probabilities are
_TRUST_PRIOR = 2.0  # tokens of prior evidence that those probabilities are right
_MIN_ROUNDS = 4  # rounds with a tree before their mean is judged, where costs are learned while decoding
_MAX_AGREEMENT = 0.9  # a drafter that would not pay with this is not tried
_LEAST_GAIN = 1.05  # in times the speed of plain decoding, for which one is tried
_PRIOR_ROUNDS = 2.0  # weight of what is expected of rounds, before there are any
_MAX_GAIN = 0.9  # upper limit of the gain demanded of a step: the first shows whether drafting pays
_FIRST_STAKE = 1.5  # time that drafting may lose before it has gained some, in plain passes
_MAX_STAKE = 8.0  # most time that it may lose, however much it has gained, in plain passes
_STEP_SHARE = 1 / 3  # share of it that further draft steps may cost, and further nodes
_LEAST_TREE = 4  # nodes that may cost all of it
_DOUBT = 0.5  # time that rounds took more than expected, from which a plain pass is measured, in plain passes
_STAKE_SHARE = 0.012  # of all time that it may lose in the long run


class FixedSizer:
    """Gives every tree one budget.

    Attributes:
        most: limits that no tree exceeds.
    """

    def __init__(self, most: TreeLimits) -> None:
        self.most = most

    def limits(self, sequences: int = 1, room: PassRoom | None = None) -> TreeLimits:
        """Limits of the next trees; see AdaptiveSizer."""
        if room is None:
            return self.most
        budget = max(min(sequences * self.most.budget, room.nodes), sequences)
        return _shared_limits(self.most, budget, self.most.free_nodes, sequences, room)

    def record(self, record: PassRecord, sequences: int = 1, other_rows: int = 0) -> None:
        """Ignore the pass: the budget is fixed."""


@dataclass(frozen=True)
class PassRoom:
    """The room for trees in a pass that is shared."""

    nodes: int  # most nodes of all trees together, their roots included
    other_rows: int = 0  # rows that the pass has in any case


class AdaptiveSizer:
    """Follows the measured cost of nodes and the measured yield of trees.

    Args:
        most: limits that no tree may exceed.
        costs: measured times of passes and draft steps; None learns them while decoding.
        first: nodes of the first tree, where costs are learned while decoding.

    Attributes:
        most: the same.
    """

    def __init__(self, most: TreeLimits, costs: RoundCosts | None = None, first: int = FIRST_BUDGET) -> None:
        self.most = most
        self._first = first
        self._costs = costs
        self._cost = OnlineCostCurve(costs, most.budget) if costs else DecayedLinearFit()
        self._steps = StepCosts(costs.step_s if costs else None, costs.row_s if costs else 0.0)
        self._ahead = ReadAhead()
        self._usual = _expected_round(costs, most, USUAL_AGREEMENT) if costs else None
        self._is_hopeless = costs is not None and _cannot_pay(costs, most)
        self._estimates: dict[int, _SpeedupEstimate] = {}
        self._expected = self._kept = 0.0  # fading sums of tokens

    def limits(self, sequences: int = 1, room: PassRoom | None = None) -> TreeLimits:
        """Limits of the next tree; as many nodes as sequences mean plain decoding.

        Args:
            sequences: how many trees share the pass; the limits are those of all together.
            room: what the pass has left for them; None for all of it.
        """
        estimate = self._estimate(sequences)
        most = self.most.budget if room is None else max(room.nodes, sequences)
        if estimate.baseline_pass_s is None:
            return replace(self.most, budget=sequences)
        hidden_s, step_s = self._ahead.seconds, self._steps.step_s
        stake_s = estimate.stake_s - max(step_s - hidden_s, 0.0)  # what is left for further nodes and steps
        within = max(
            self._cost.nodes_within(sequences, _STEP_SHARE * max(stake_s, 0.0)),
            min(self._cost.nodes_within(sequences, max(stake_s, 0.0)), _LEAST_TREE * sequences),
        )
        if estimate.is_in_doubt or stake_s < 0 or within <= sequences or (self._is_hopeless and not hidden_s):
            return replace(self.most, budget=sequences)
        per_node = self._cost.slope
        if per_node is None:
            return replace(self.most, budget=min(self._first * sequences, most))
        trust = (self._kept + _TRUST_PRIOR) / (self._expected + _TRUST_PRIOR)
        worth = estimate.token_s(sequences) * trust  # seconds that a promised token saves
        chance = min(max(per_node / worth, 1e-6), 1.0)
        # The first step is always taken: it shows whether drafting pays.
        gain, row_gain = min(step_s / worth, _MAX_GAIN * sequences), self._steps.row_s / worth
        return replace(
            _shared_limits(
                self.most, min(most, within), max(self._cost.free, self.most.free_nodes), sequences, room
            ),
            min_logprob=math.log(chance),
            min_gain=gain,
            row_gain=row_gain,
            overlap_budget=hidden_s / worth,
            loss_budget=gain + _STEP_SHARE * stake_s / worth,
            trust=trust,
        )

    def record(self, record: PassRecord, sequences: int = 1, other_rows: int = 0) -> None:
        """Learn from a pass.

        Args:
            record: of all trees together.
            other_rows: rows that were no nodes.
        """
        # Draft steps that are counted have a cost of their own; others are part of the nodes' cost.
        rows, draft_s = record.nodes + other_rows, record.draft_s if record.draft_steps else 0.0
        pass_s = record.recurring_s - draft_s
        expected_s = self._cost.expected(rows)
        self._cost.add(rows, pass_s, record.wait_s)
        if record.draft_steps:
            self._steps.add(record)
            self._ahead.add(record)
            draft_s = self._steps.recurring(record)
        self._expected = _TRUST_MEMORY * self._expected + record.expected_accepted
        self._kept = _TRUST_MEMORY * self._kept + (record.accepted if record.expected_accepted else 0)
        if not other_rows:  # what these take would count against the trees
            estimate = self._estimate(sequences)
            if record.nodes > sequences:
                pass_s = self._cost.undisturbed(rows, pass_s)
                estimate.limit_baseline(self._cost.expected(sequences))
            estimate.add(record, sequences, pass_s + draft_s, pass_s - (expected_s or pass_s))

    def _estimate(self, sequences: int) -> _SpeedupEstimate:
        """The estimate of drafting for about as many sequences."""
        kind = sequences.bit_length()
        if kind not in self._estimates:
            baseline_pass_s = self._costs.verify.at(sequences) if self._costs else None
            self._estimates[kind] = _SpeedupEstimate(baseline_pass_s, self._usual if sequences == 1 else None)
        return self._estimates[kind]


def _shared_limits(
    most: TreeLimits, budget: int, free: int, sequences: int, room: PassRoom | None
) -> TreeLimits:
    """Limits of trees that share a pass with each other and with other rows."""
    if room is None:
        return replace(most, budget=budget, free_nodes=min(free, budget))
    free = min(max(free - room.other_rows, sequences), budget)
    return replace(
        most, budget=budget, free_nodes=free, row_multiple=1 if room.other_rows else most.row_multiple
    )


@dataclass(frozen=True)
class _Round:
    """Seconds and tokens of a round with a tree."""

    nodes: int
    seconds: float
    tokens: float


def _expected_round(costs: RoundCosts, most: TreeLimits, agreement: float) -> _Round:
    """A round with trees of the best size for a drafter that agrees with its target as often as this."""
    return _best_round(costs, most, expected_yields(agreement))


def _best_round(costs: RoundCosts, most: TreeLimits, yields: TreeYields) -> _Round:
    """A round with trees of the size that is fastest with these yields."""

    def round_of(nodes: int) -> _Round:
        steps = min(yields.steps_at(nodes), most.depth)
        draft_s = even_draft_seconds(costs.step_s or 0.0, costs.row_s, steps, yields.rows_at(nodes))
        return _Round(nodes, costs.verify.at(nodes) + draft_s, yields.at(nodes))

    sizes = [nodes for nodes in BUDGETS if 1 < nodes <= most.budget] or [1]
    return min(map(round_of, sizes), key=lambda each: each.seconds / each.tokens)


def fixed_nodes(usual: int, costs: RoundCosts | None, most: TreeLimits, *, chain: bool) -> int:
    """Nodes of trees that may not change their size while running.

    The usual number, unless so many rows are known to cost a pass no time; then as many as a drafter that
    agrees with its target as often as usual is fastest with.

    Args:
        costs: known when the models are loaded; None if nothing is.
        chain: whether the nodes are a single path.
    """
    if costs is None or costs.verify.knee() < usual:
        return min(usual, most.budget)
    yields = expected_chain_yields(USUAL_AGREEMENT) if chain else expected_yields(USUAL_AGREEMENT)
    found = _best_round(costs, most, yields).nodes
    return min(max(found, usual), most.budget)


def _cannot_pay(costs: RoundCosts, most: TreeLimits) -> bool:
    """True if trees would not pay even if the drafter agreed with its target nearly always."""
    best = _expected_round(costs, most, _MAX_AGREEMENT)
    return costs.verify.at(1) * best.tokens < _LEAST_GAIN * best.seconds


class _SpeedupEstimate:
    """An estimate of whether drafting pays, by the rounds so far.

    Drafting has a stake: the time that it may lose from now on. What a round gains over plain decoding is
    added to the stake, and what it loses is taken from it, so no round may cost more than is left. Where
    drafting pays, the stake soon allows trees of any size; where it does not, a few small trees use it up.

    Attributes:
        baseline_pass_s: seconds of a pass without drafted nodes; None before the first.
    """

    def __init__(self, baseline_pass_s: float | None, usual: _Round | None) -> None:
        self.baseline_pass_s = baseline_pass_s
        self._stake = _FIRST_STAKE  # in plain passes
        self._surplus_s = self._expected_s = 0.0  # of rounds since the last plain pass
        self._rounds = 0
        self._weight = _PRIOR_ROUNDS if usual else 0.0
        self._seconds = usual.seconds if usual else 0.0  # running means of rounds with drafts
        self._tokens = usual.tokens if usual else 0.0

    @property
    def stake_s(self) -> float:
        """Seconds that the next round may lose if no drafted token is accepted."""
        return self._stake * (self.baseline_pass_s or 0.0)

    def token_s(self, sequences: int) -> float:
        """Seconds a token takes, by the better of both ways."""
        assert self.baseline_pass_s is not None
        plain = self.baseline_pass_s / sequences
        unknown = not self._weight or (self._weight == self._rounds < _MIN_ROUNDS)
        return plain if unknown else min(plain, self._seconds / self._tokens)

    @property
    def is_in_doubt(self) -> bool:
        """True if rounds took longer than expected, and a plain pass has to show whether all passes do."""
        return self._surplus_s > _DOUBT * (self.baseline_pass_s or math.inf)

    def limit_baseline(self, seconds: float | None) -> None:
        """Believe no plain pass to take longer than this, because larger passes did not."""
        if seconds and self.baseline_pass_s:
            self.baseline_pass_s = min(self.baseline_pass_s, seconds)

    def add(self, record: PassRecord, sequences: int, drafted_s: float, surplus_s: float) -> None:
        """Learn from a round.

        Args:
            drafted_s: its seconds, without what was spent on reading tokens that were new to the drafter, and
                without what other programs took.
            surplus_s: how much longer than expected its pass took.
        """
        seconds = record.recurring_s
        if record.nodes == sequences:
            self._measure_baseline(record.target_s)
        if not self.baseline_pass_s:
            return
        gained = _STAKE_SHARE * seconds / self.baseline_pass_s
        if record.nodes > sequences or record.draft_s >= 0.01 * seconds:
            tokens = record.accepted + sequences
            self._rounds += 1
            self._weight += 1
            weight = max(1 / self._weight, 1 - _MEMORY)
            self._seconds += weight * (drafted_s - self._seconds)
            self._tokens += weight * (tokens - self._tokens)
            surplus_s = max(surplus_s, -self._surplus_s)
            self._surplus_s += surplus_s
            self._expected_s += drafted_s - surplus_s
            gained += tokens / sequences - (drafted_s - surplus_s) / self.baseline_pass_s
        self._stake = min(self._stake + gained, _MAX_STAKE)

    def _measure_baseline(self, seconds: float) -> None:
        """Learn from a plain pass, and charge the rounds before it with what they took more than it did."""
        known = self.baseline_pass_s
        if known:
            slower = 1 + self._surplus_s / self._expected_s if self._expected_s else 1.0
            # The shortest pass is the least disturbed by other programs; passes slow down only gradually,
            # or as the rounds before them did.
            seconds = min(seconds, max(slower, 1.05) * known)
            explained_s = max(seconds / known - 1, 0.0) * self._expected_s
            self._stake -= max(self._surplus_s - explained_s, 0.0) / known
        self._surplus_s = self._expected_s = 0.0
        self.baseline_pass_s = seconds
