"""The interface of verification rules: a drafted tree and two laws in, an accepted path out.

A law is a probability distribution over the next token: a (n_vocab,) float64 array that sums to 1. A node has
two of them, the target's and the drafter's, both after penalties, filters and temperature, so that rules
compare the distributions that tokens are really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.draws import Draws
from edgespec.speculation.tree import Acceptance, TokenTree

Law = NDArray[np.float64]
TargetLaw = Callable[[int], Law]


@dataclass(frozen=True)
class DraftedTree:
    """A tree, and how its tokens were drawn, for rules that need to know."""

    tree: TokenTree  # no two siblings hold the same token
    # node -> the tokens drawn below it, in order; a token drawn twice appears twice
    drawn: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # node -> (n_vocab,) the drafter's law that these tokens were drawn from
    laws: Mapping[int, Law] = field(default_factory=dict)


class Verifier(Protocol):
    """A verification rule: decides which drafted tokens are accepted, and which token follows them."""

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        """The accepted path.

        Args:
            law: returns the target's law after a node; called for no more nodes than the rule needs.
            draws: source of randomness.
        """


def excess(above: Law, below: Law) -> Law:
    """The excess of one distribution over another, as weights: the residual to draw from after a rejection.

    It is 0 everywhere only if both laws are equal. Then only rounding can cause a rejection, and the first
    law itself is returned.
    """
    rest: Law = np.maximum(above - below, 0.0)
    return rest if rest.any() else above
