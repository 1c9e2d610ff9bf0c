"""Speculative sampling and its extensions to several candidates: try one drafted token after another.

The acceptance probability is such that every token ends up exactly as likely as the target makes it. After a
rejection, the residual of the target's law is what the rejected draw could not cover.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.draws import Draws
from edgespec.speculation.sampling import sample_and_match
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, Law, TargetLaw, Verifier, excess


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
