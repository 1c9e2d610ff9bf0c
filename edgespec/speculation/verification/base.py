"""What every rule is given, and what it gives back.

A law is a (n_vocab,) float64 array of probabilities that sum to 1. Both laws of a node, the target's and the
drafter's, are those after penalties, filters and temperature: the rules compare what is really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.draws import Draws
from edgespec.speculation.tree import TokenTree

Law = NDArray[np.float64]
TargetLaw = Callable[[int], Law]


@dataclass(frozen=True)
class Acceptance:
    """What a pass yields.

    Attributes:
        path: accepted nodes from the root, the root included.
        bonus: the token the target chose after the last of them.
    """

    path: tuple[int, ...]
    bonus: int


@dataclass(frozen=True)
class DraftedTree:
    """A tree, and how its tokens were drawn where the rule asks for it.

    Attributes:
        tree: no two siblings hold the same token.
        drawn: node -> the tokens drawn below it, in order; a token drawn twice stands twice.
        laws: node -> (n_vocab,) the drafter's law there, which the tokens were drawn from.
    """

    tree: TokenTree
    drawn: Mapping[int, Sequence[int]] = field(default_factory=dict)
    laws: Mapping[int, Law] = field(default_factory=dict)


class Verifier(Protocol):
    """A rule: decides which drafted tokens are accepted, and the token that follows them."""

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        """The accepted path.

        Args:
            law: gives the target's law after a node. Asked for as few nodes as the rule needs.
            draws: where chance comes from.
        """


def excess(above: Law, below: Law) -> Law:
    """Where one law exceeds another, as weights: what is left to draw from after a rejection.

    Nothing exceeds only if both are the same, and then nothing is rejected but by rounding: the first law
    itself is left.
    """
    rest: Law = np.maximum(above - below, 0.0)
    return rest if rest.any() else above
