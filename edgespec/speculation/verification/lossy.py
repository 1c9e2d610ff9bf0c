"""Lossy rules: the longest path whose tokens all pass a test on the target's law, and BiLD's rollback."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.draws import Draws
from edgespec.speculation.tree import Acceptance
from edgespec.speculation.verification.base import DraftedTree, Law, TargetLaw, Verifier


class Longest(Verifier):
    """Accepts the longest path that passes, of equally long ones the likeliest; then the likeliest token."""

    def accept(self, drafted: DraftedTree, law: TargetLaw, draws: Draws) -> Acceptance:
        tree = drafted.tree
        below: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(tree.parents.tolist()):
            below[parent].append(node)
        best = (-1, 0.0, 0, 0)  # depth, log-probability, node, the token after it
        open_nodes = [(0, 0.0)]
        while open_nodes:
            node, logprob = open_nodes.pop()
            target = law(node)
            best = max(best, (int(tree.depths[node]), logprob, node, int(target.argmax())))
            children = below[node]
            if children:
                tokens = tree.tokens[children]
                for passed in np.flatnonzero(self.passes(target, tokens)).tolist():
                    open_nodes.append((children[passed], logprob + float(np.log(target[tokens[passed]]))))
        return Acceptance(tuple(tree.path(best[2])), best[3])

    @abstractmethod
    def passes(self, target: Law, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tell which tokens pass; never one whose probability is 0."""


class Typical(Longest):
    """Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1).

    A token passes if its probability exceeds min(epsilon, delta exp(-entropy)): strict where the target is
    certain, permissive where many tokens are plausible.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon = epsilon
        self._delta = delta

    def passes(self, target: Law, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        likely = target[target > 0]
        entropy = -float(likely @ np.log(likely))
        passed: NDArray[np.bool_] = target[tokens] > min(self._epsilon, self._delta * np.exp(-entropy))
        return passed


class TopKGap(Longest):
    """SpecDec's test (Xia et al. 2023): among the k likeliest tokens, and not far behind the first.

    Args:
        gap: how many nats a token's log-probability may be below that of the likeliest.
    """

    def __init__(self, k: int, gap: float) -> None:
        self._k = k
        self._gap = gap

    def passes(self, target: Law, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        chances = target[tokens]
        rank = (target[None, :] > chances[:, None]).sum(axis=1)
        passed: NDArray[np.bool_] = rank < self._k
        passed &= chances > 0
        passed &= chances >= target.max() * np.exp(-self._gap)
        return passed


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
