"""Exact distributions: every outcome of a random procedure, with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _OpenQuestion(Exception):
    """The script ends where these answers are possible."""

    def __init__(self, answers: list[tuple[int, float]]) -> None:
        self.answers = answers


class ScriptedDraws:
    """Answers random decisions from a script, and raises when the script ends."""

    def __init__(self, script: Sequence[int]) -> None:
        self._answers = iter(script)

    def coin(self, chance: float) -> bool:
        assert chance >= 0
        return bool(self._answer([(0, 1 - min(chance, 1.0)), (1, min(chance, 1.0))]))

    def pick(self, weights: NDArray[np.float64]) -> int:
        assert (weights >= 0).all()
        return self._answer(list(enumerate((weights / weights.sum()).tolist())))

    def _answer(self, answers: list[tuple[int, float]]) -> int:
        possible = [(answer, chance) for answer, chance in answers if chance > 0]
        if len(possible) == 1:
            return possible[0][0]
        for answer in self._answers:
            return answer
        raise _OpenQuestion(possible)


def outcomes(run: Callable[[ScriptedDraws], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of `run` with its probability; the same outcome may come more than once."""
    scripts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while scripts:
        script, weight = scripts.pop()
        try:
            yield run(ScriptedDraws(script)), weight
        except _OpenQuestion as question:
            scripts += [((*script, answer), weight * chance) for answer, chance in question.answers]


def law_of(run: Callable[[ScriptedDraws], H]) -> dict[H, float]:
    """The law of what `run` returns."""
    law: dict[H, float] = defaultdict(float)
    for outcome, weight in outcomes(run):
        law[outcome] += weight
    return law
