"""How large the next tree should be, from what the passes so far have cost and yielded.

A node is worth its place if the chance that it is accepted, times the seconds a token takes otherwise,
exceeds the seconds it adds to the pass; a draft step is worth taking while the tokens it may add are worth
more than its seconds (the threshold of OPT-Tree, Wang et al. 2024, from measured times). The chances are the
policy's, corrected by how many tokens its trees promised and how many were accepted. Where passes cost the
same for one node as for many, large trees follow; where every node costs, small ones; where draft steps are
dear, shallow ones; and where speculation does not pay, none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.generation import PassRecord
from edgespec.speculation.growth import TreeLimits

_FIRST_BUDGET = 16  # before anything is known
_MEMORY = 0.9  # weight of the past in a running mean, per pass
_TRUST_MEMORY = 0.95  # the same, for how far the drafter's probabilities can be believed
_TRUST_PRIOR = 2.0  # tokens that stand for taking the drafter at its word
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 256  # passes
_PATIENCE = 4  # rounds with a tree before they are judged
_MOST_GAIN = 0.9  # never ask for more of a step: the first one tells what drafting is good for


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
    """Follows the measured cost of nodes and the measured yield of trees."""

    def __init__(self, most: TreeLimits) -> None:
        self._most = most
        self._cost = _LineFit()
        self._plain_s: float | None = None  # seconds of a pass over the root alone
        self._round_s = 0.0  # running means over rounds with a tree
        self._round_tokens = 0.0
        self._rounds = 0
        self._pause = 0
        self._next_pause = _SHORTEST_PAUSE
        self._promised = self._kept = 0.0  # fading sums of tokens
        self._step_s: float | None = None  # seconds of a draft step

    def limits(self) -> TreeLimits:
        """What the next tree may cost; a budget of 1 means plain decoding."""
        if self._plain_s is None or self._pause > 0:
            return self._replace(budget=1)
        per_node = self._cost.slope
        if per_node is None:
            return self._replace(budget=min(_FIRST_BUDGET, self._most.budget))
        per_token = self._plain_s
        if self._rounds >= _PATIENCE:
            per_token = min(per_token, self._round_s / self._round_tokens)
        trust = (self._kept + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR)
        worth = per_token * trust  # seconds that a promised token saves
        chance = min(max(per_node / worth, 1e-6), 1.0)
        gain = min((self._step_s or 0.0) / worth, _MOST_GAIN)
        return self._replace(self._most.budget, math.log(chance), gain)

    def record(self, record: PassRecord) -> None:
        """Learn from a pass."""
        seconds = record.seconds
        # Steps are priced by themselves where they are known; elsewhere they are part of what nodes cost.
        self._cost.add(record.nodes, seconds - record.draft_s if record.draft_steps else seconds)
        if record.draft_steps:
            # The shortest, as some steps also read what the text gained meanwhile.
            self._step_s = min(record.draft_s / record.draft_steps, 1.05 * (self._step_s or math.inf))
        self._promised = _TRUST_MEMORY * self._promised + record.promised
        self._kept = _TRUST_MEMORY * self._kept + (record.accepted if record.promised else 0)
        self._pause = max(self._pause - 1, 0)
        if record.nodes == 1:
            # The shortest is the least disturbed by other programs, and a pass only gets dearer slowly.
            self._plain_s = min(seconds, 1.05 * (self._plain_s or math.inf))
            if record.draft_s < 0.01 * seconds:
                return
        self._rounds += 1
        weight = max(1 / self._rounds, 1 - _MEMORY)
        self._round_s += weight * (seconds - self._round_s)
        self._round_tokens += weight * (record.accepted + 1 - self._round_tokens)
        if self._rounds >= _PATIENCE and self._plain_s is not None:
            self._judge(self._plain_s)

    def _judge(self, plain_s: float) -> None:
        if self._round_s / self._round_tokens <= plain_s:
            self._next_pause = _SHORTEST_PAUSE
            return
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._rounds = 0

    def _replace(self, budget: int, min_logprob: float = -math.inf, min_gain: float = 0.0) -> TreeLimits:
        return replace(self._most, budget=budget, min_logprob=min_logprob, min_gain=min_gain)


class _LineFit:
    """Seconds of a round as a straight line over its nodes, the past fading."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        fade = 0.98
        self._n = fade * self._n + 1
        self._x = fade * self._x + x
        self._y = fade * self._y + y
        self._xx = fade * self._xx + x * x
        self._xy = fade * self._xy + x * y

    @property
    def slope(self) -> float | None:
        """Seconds a node adds; None while all rounds had about as many nodes."""
        spread = self._n * self._xx - self._x * self._x
        if spread < self._n:
            return None
        return max((self._n * self._xy - self._x * self._y) / spread, 0.0)
