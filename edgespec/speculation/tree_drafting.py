"""Tree drafting: by ranking the drafter's best candidates, or by sampling from its distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from edgespec.speculation.constraint import Constraint
from edgespec.speculation.drafters.base import Drafter, DraftRequest
from edgespec.speculation.draws import DrawSource
from edgespec.speculation.growth import Children, Growth, TreeLimits
from edgespec.speculation.noise import Stream
from edgespec.speculation.ranking import ByProbability, Ranking
from edgespec.speculation.sampled_trees import Drawing, DrawingDrafter, Shape
from edgespec.speculation.sampling import Sampler
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree, Law


class TreeDrafting(Protocol):
    """Makes a drafter grow the kind of tree that a verification rule needs."""

    def draft(self, drafter: Drafter, text: Sequence[int], limits: TreeLimits) -> DraftedTree:
        """A tree below the last token of the text."""

    def request(self, text: Sequence[int], limits: TreeLimits) -> DraftRequest | None:
        """The request for a tree that grows together with those of other texts; None if it cannot."""
        del text, limits
        return None

    def drafted(self, tree: TokenTree, text: Sequence[int]) -> DraftedTree:
        """What is sent to the target of a tree that `request` asked for."""
        del text
        return DraftedTree(tree)


@dataclass(frozen=True)
class RankedDrafting(TreeDrafting):
    """The best nodes by a ranking, as a tree or as a chain.

    Attributes:
        growth: score and stop rule, which may learn from how the text continues. The default scores by the
            drafter's own probability and merges in nothing from the text, for rules that judge the drafter's
            tokens.
    """

    ranking: Ranking
    chain: bool = False
    constraint: Constraint | None = None
    growth: Growth = Growth(merges=False, ends=True)  # noqa: RUF009 (frozen)

    def draft(self, drafter: Drafter, text: Sequence[int], limits: TreeLimits) -> DraftedTree:
        request = self.request(text, limits)
        return self.drafted(drafter.draft(request.text, request.limits, request.ranking), text)

    def request(self, text: Sequence[int], limits: TreeLimits) -> DraftRequest:
        limits = replace(limits, growth=self.growth)
        if self.chain:
            limits = replace(limits, leaves=1, width=1, branching=1)
        constraint = self.constraint
        ranking = self.ranking if constraint is None else constraint.guiding(self.ranking, text)
        return DraftRequest(text, limits, ranking)

    def drafted(self, tree: TokenTree, text: Sequence[int]) -> DraftedTree:
        return DraftedTree(tree if self.constraint is None else self.constraint.pruned(tree, text))


@dataclass(frozen=True)
class OneHotDrafting(TreeDrafting):
    """The best chain, presented as draws from distributions that have a single token each.

    Args:
        n_vocab: size of the target's vocabulary.
    """

    n_vocab: int

    def draft(self, drafter: Drafter, text: Sequence[int], limits: TreeLimits) -> DraftedTree:
        tree = RankedDrafting(ByProbability(), chain=True).draft(drafter, text, limits).tree
        tokens = list(enumerate(tree.tokens[1:].tolist()))
        return DraftedTree(
            tree,
            {node: [token] for node, token in tokens},
            {node: self._one_hot(token) for node, token in tokens},
        )

    def _one_hot(self, token: int) -> Law:
        law = np.zeros(self.n_vocab)
        law[token] = 1.0
        return law


@dataclass(frozen=True)
class SampledDrafting(TreeDrafting):
    """Tokens sampled from the drafter's law, with the target's penalties, filters and temperature.

    Args:
        shape: how many tokens are drawn, and where, within limits.
        replacement: whether a token may be drawn twice below one node.
        n_vocab: size of the target's vocabulary.
    """

    shape: Callable[[TreeLimits], Shape]
    replacement: bool
    sampler: Sampler
    n_vocab: int
    draws: DrawSource

    def draft(self, drafter: Drafter, text: Sequence[int], limits: TreeLimits) -> DraftedTree:
        assert isinstance(drafter, DrawingDrafter), "checked by method_for"

        def law(logits: FloatArray, below: Sequence[int]) -> Law:
            if len(logits) < self.n_vocab:
                missing = np.full(self.n_vocab - len(logits), -np.inf, dtype=np.float32)
                logits = np.concatenate([logits, missing])
            return self.sampler.law(logits, [*text, *below] if self.sampler.penalizes else text)

        draws = self.draws(Stream.DRAFTING, len(text))
        drawing = Drawing(self.shape(limits), self.replacement, law, draws, limits.ends)
        return drafter.draw(text, drawing, limits.width)


class ConfidenceFloor(Ranking):
    """Ends a draft where the drafter's best candidate is less likely than `floor` (BiLD's fallback)."""

    def __init__(self, floor: float) -> None:
        self._floor = floor

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        children = ByProbability().best(logits, positions, count, after)
        unsure = np.exp(children.logprobs[:, :1]) < self._floor
        return Children(children.tokens, np.where(unsure, np.float32(-np.inf), children.logprobs))
