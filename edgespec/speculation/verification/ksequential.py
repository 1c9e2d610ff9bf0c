"""SpecTr: accept the first of k independent draws that passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.speculation.draws import Draws
from edgespec.speculation.sampling import sample_and_match
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, Law, TargetLaw, Verifier, excess

_HALVINGS = 60  # bisection steps, enough for the last bit


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
