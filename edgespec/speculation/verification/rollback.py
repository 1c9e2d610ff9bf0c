"""BiLD, a lossy rule: keep the drafter's tokens until the target disagrees too much."""

from __future__ import annotations

import math

from edgespec.speculation.draws import Draws
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, TargetLaw, Verifier


class Rollback(Verifier):
    """The rollback policy of Big Little Decoder (Kim et al. 2023), on a chain.

    The chain is cut before the first token x with -log target(x) above `distance`, and continues with the
    target's likeliest token there.

    Args:
        distance: nats.
        mismatches: if above 0, cut instead before the first of this many consecutive tokens that are not
            the target's likeliest.
    """

    def __init__(self, distance: float, mismatches: int = 0) -> None:
        self._distance = distance
        self._mismatches = mismatches

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        tree = drafted.tree
        path = range(len(tree))  # the tree is a chain
        likeliest: list[int] = []
        run = 0
        for node in path:
            target = law(node)
            likeliest.append(int(target.argmax()))
            if node == len(tree) - 1:
                break
            token = int(tree.tokens[node + 1])
            run = run + 1 if token != likeliest[-1] else 0
            if self._mismatches:
                kept = node - run + 1 if run == self._mismatches else None
            else:
                chance = float(target[token])
                kept = node if chance == 0 or -math.log(chance) > self._distance else None
            if kept is not None:
                return Acceptance(tuple(path[: kept + 1]), likeliest[kept])
        return Acceptance(tuple(path), likeliest[-1])
