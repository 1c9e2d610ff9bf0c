"""Block verification: accept or reject a drafted chain as a whole, not token by token."""

from __future__ import annotations

import numpy as np

from edgespec.speculation.draws import Draws
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, TargetLaw, Verifier


class Block(Verifier):
    """Accepts the longest prefix of a chain that passes (block verification, Sun et al. 2025).

    The result follows the target's law. No lossless rule for a single chain accepts more tokens on average,
    so it never accepts fewer than speculative sampling does.
    """

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        path = [0]
        weights = [1.0]  # for each prefix the product of probability ratios, capped at 1
        targets, drafters = [law(0)], []
        while drawn := drafted.drawn.get(path[-1]):
            token = drawn[0]
            drafters.append(drafted.laws[path[-1]])
            weights.append(min(1.0, weights[-1] * float(targets[-1][token] / drafters[-1][token])))
            child = drafted.tree.child(path[-1], token)
            assert child is not None, "every drawn token has a node"
            path.append(child)
            targets.append(law(child))
        # Each length has a coin of its own and the longest that passes counts, so the longest is tried first.
        last = len(path) - 1
        if draws.coin(weights[last]):
            return Acceptance(tuple(path), draws.pick(targets[last]))
        length, rest = last, targets[last]
        while length:
            length -= 1
            rest = np.maximum(weights[length] * targets[length] - drafters[length], 0.0)
            total = float(rest.sum())
            short = 1.0 - weights[length]
            if draws.coin(total / (total + short) if total + short else 1.0):
                break
        return Acceptance(tuple(path[: length + 1]), draws.pick(rest if rest.any() else targets[length]))
