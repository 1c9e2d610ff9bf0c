"""Rules that weigh drawn drafts against the target's law, token by token or a chain as a whole.

The acceptance probability is such that every token ends up exactly as likely as the target makes it. After a
rejection, the residual of the target's law is what the rejected draw could not cover.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.speculation.draws import Draws
from edgespec.speculation.sampling import sample_and_match
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, Law, TargetLaw, Verifier, excess

_HALVINGS = 60  # bisection steps, enough for the last bit


class Rejection(Verifier):
    """Accepts a token x with probability min(1, r(x) / d(x)); after a rejection, r becomes norm([r - d]+).

    r starts as the target's law and d as the drafter's. With one draw per node this is speculative sampling
    (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). With several draws made with replacement, d
    stays the same (SpecInfer's multi-step sampling, Miao et al. 2024, algorithm 2). With draws made
    without replacement, each rejected token is removed from d, which is normalized again (recursive
    rejection sampling, Jeon et al. 2024; Sequoia, Chen et al. 2024), so no token is tried twice.

    Args:
        replacement: whether a token could be drawn twice below one node.
        lenience: below 1 this factor on d accepts more, and the text is no longer the target's own
            (Leviathan et al. 2023, appendix A.5): no token gets more than 1 / lenience times its probability.
    """

    def __init__(self, *, replacement: bool = False, lenience: float = 1.0) -> None:
        self._replacement = replacement
        self._lenience = lenience

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        def choose(node: int) -> int:
            drawn = drafted.drawn.get(node)
            return self.token(law(node), drafted.laws[node], drawn, draws) if drawn else draws.pick(law(node))

        return sample_and_match(drafted.tree, choose)

    def token(self, target: Law, drafter: Law, drawn: Sequence[int], draws: Draws) -> int:
        """The token after a node: an accepted draw, or one from the residual of the target's law."""
        for token in drawn:
            limit = self._lenience * drafter[token]
            if draws.coin(target[token] / limit if limit else 1.0):
                return token
            target = excess(target, drafter)
            target /= target.sum()
            if not self._replacement:
                drafter = drafter.copy()
                drafter[token] = 0.0
                # The sum is 0 only after the last draw, because tokens of probability 0 are never drawn.
                drafter /= drafter.sum() or 1.0
        return draws.pick(target)


class BlockVerifier(Verifier):
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


class KSequential(Verifier):
    """K-sequential selection (SpecTr, Sun et al. 2023), at each position of k drafted sequences.

    Its k tokens are the next ones of those sequences that agree so far, so they are independent draws from
    one law.
    """

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        def choose(node: int) -> int:
            drawn = drafted.drawn.get(node)
            return _token(law(node), drafted.laws[node], drawn, draws) if drawn else draws.pick(law(node))

        return sample_and_match(drafted.tree, choose)


def _token(target: Law, drafter: Law, drawn: Sequence[int], draws: Draws) -> int:
    """Accept each draw x with probability min(1, target(x) / (rho drafter(x)))."""
    rho = smallest_rho(target, drafter, len(drawn))
    covered = np.minimum(drafter, target / rho)
    passes = float(covered.sum())  # the probability that one draw is accepted
    for token in drawn:
        if draws.coin(target[token] / (rho * drafter[token])):
            return token
    accepted = 1.0 - (1.0 - min(passes, 1.0)) ** len(drawn)
    return draws.pick(excess(target, covered * (accepted / passes)) if passes else target)


def smallest_rho(target: Law, drafter: Law, count: int) -> float:
    """The smallest rho in [1, count] for which no token is accepted too often.

    With b(rho) = sum min(drafter, target / rho), that is 1 - (1 - b)^count <= rho b.
    """
    if count == 1:
        return 1.0
    # Only tokens whose ratio lies inside the interval change sides; the sums over the others are constant.
    common = (target > 0) & (drafter > 0)
    q, p = target[common], drafter[common]
    always, never = q >= count * p, q <= p
    fixed_p, fixed_q = float(p[always].sum()), float(q[never].sum())
    between = ~(always | never)
    q, p = q[between], p[between]

    def fits(rho: float) -> bool:
        b = min(fixed_p + fixed_q / rho + float(np.minimum(p, q / rho).sum()), 1.0)
        return 1.0 - (1.0 - b) ** count <= rho * b

    low, high = 1.0, float(count)
    if fits(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
