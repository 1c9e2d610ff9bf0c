"""The decision whether a draft model is worth its time in a round where other sources have proposed a tree.

Where a sequence quotes or repeats itself, its own text proposes long paths in no time, and a model adds
little to them. So a model is asked if the tokens that it adds to such a pass are more than its draft steps
cost.
"""

from __future__ import annotations

from bisect import bisect_right

from edgespec.speculation.growth import TreeLimits

_LIMITS = (1.25, 1.75, 2.5, 4.0, 6.5, 10.0)  # promised tokens: limits of classes
_MEMORY = 0.97  # weight of the past in a running mean, per round
_PRIOR = 4.0  # weight of what is expected before there are rounds, in rounds
_USUAL_GAIN = 2.5  # tokens that a model is expected to add
_USUAL_STEPS, _USUAL_ROWS = 2.0, 3.0
_ASKED_AT_LEAST = 8  # rounds of a class in which a model is asked once, whatever was seen


class ModelGain:
    """The yields of rounds with and without the model, by what the other sources promised."""

    def __init__(self) -> None:
        self._with_model: dict[int, _Mean] = {}
        self._without: dict[int, _Mean] = {}
        self._since: dict[int, int] = {}  # rounds without the model since the last one with it
        self._steps, self._rows = _Mean(_USUAL_STEPS), _Mean(_USUAL_ROWS)

    def pays(self, promised: float, limits: TreeLimits) -> bool:
        """True if the model is worth asking.

        Args:
            promised: expected tokens of a pass with the other sources' tree, the bonus token included.
            limits: of the tree, with what a draft step costs in tokens.
        """
        kind = bisect_right(_LIMITS, promised)
        if self._since.get(kind, 0) >= _ASKED_AT_LEAST - 1:
            return True
        cost = self._steps.value * limits.min_gain + self._rows.value * limits.row_gain
        cost = (cost - limits.overlap_budget) * limits.trust  # in tokens that are accepted
        with_model = self._mean(self._with_model, kind, promised + _USUAL_GAIN)
        return with_model.value - self._mean(self._without, kind, promised).value > cost

    def add(self, promised: float, yielded: int, draft: tuple[int, int] | None) -> None:
        """Learn from a round.

        Args:
            yielded: tokens of the pass, the bonus token included.
            draft: the model's draft steps, and the nodes read in them; None if it was not asked.
        """
        kind = bisect_right(_LIMITS, promised)
        if draft is None:
            self._since[kind] = self._since.get(kind, 0) + 1
            self._mean(self._without, kind, promised).add(yielded)
            return
        self._since[kind] = 0
        self._mean(self._with_model, kind, promised + _USUAL_GAIN).add(yielded)
        self._steps.add(draft[0])
        self._rows.add(draft[1])

    @staticmethod
    def _mean(means: dict[int, _Mean], kind: int, usual: float) -> _Mean:
        return means.setdefault(kind, _Mean(usual))


class _Mean:
    """A running mean that begins with what is usual."""

    def __init__(self, usual: float) -> None:
        self.value = usual
        self._weight = _PRIOR

    def add(self, value: float) -> None:
        self._weight += 1
        self.value += max(1 / self._weight, 1 - _MEMORY) * (value - self.value)
