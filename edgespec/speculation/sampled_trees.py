"""Trees sampled from the drafter's distribution, for rules that compare it with the target's.

How many tokens are drawn below a node is fixed before any of them is drawn, by a shape and by the place in
the shape that the node itself took. If it depended on the draws, the rules would not be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.drafters.base import Drafter, DraftMemory, TreeDrafting
from edgespec.speculation.draws import Draws, DrawSource
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.noise import NoiseStream
from edgespec.speculation.sampling import Sampler
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree
from edgespec.speculation.tree_search import grow
from edgespec.speculation.verification.base import DraftedTree, Law

# Assumed probabilities that the target accepts a node's first, second, ... draw. They only shape the tree.
_CHANCES = (0.6, 0.16, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01)


@dataclass(frozen=True)
class TreeShape:
    """The nodes at which tokens will be drawn, decided before any is."""

    below: tuple[tuple[int, ...], ...]  # the shape nodes below each shape node; node 0 is the root

    @classmethod
    def of(cls, parents: Sequence[int]) -> TreeShape:
        """Build from the parent of each node; parents come before their children, and the root has -1."""
        below: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0:
                below[parent].append(node)
        return cls(tuple(map(tuple, below)))


def chain(limits: TreeLimits) -> TreeShape:
    """Draw one after another."""
    return TreeShape.of(range(-1, min(limits.budget - 1, limits.depth)))


def sequences(limits: TreeLimits) -> TreeShape:
    """Several independent chains from the root (SpecTr): about as many as each is long."""
    room = limits.budget - 1
    count = max(1, min(math.isqrt(room), limits.leaves))
    length = min(room // count, limits.depth)
    parents = [-1]
    for _ in range(count):
        parents += [0, *range(len(parents), len(parents) + length - 1)][:length]
    return TreeShape.of(parents)


@lru_cache(maxsize=64)
def by_rank(limits: TreeLimits) -> TreeShape:
    """The tree with the most accepted tokens on average, if acceptance depends on a draw's rank alone.

    Sequoia (Chen et al. 2024, section 3.1). Scores fall along paths and across siblings, so the best nodes
    form a tree, and best-first search finds the same tree as the paper's dynamic program.
    """
    chances = np.log(np.array(_CHANCES[: limits.branching], dtype=np.float32))
    ranks = np.arange(len(chances), dtype=np.int32)

    def expand(frontier: Frontier) -> Children:
        shape = (len(frontier.nodes), 1)
        return Children(np.tile(ranks, shape), np.tile(chances, shape))

    return TreeShape.of(
        grow(0, expand, replace(limits, is_end=None)).parents.tolist()
    )  # ranks are not tokens


@dataclass(frozen=True)
class Drawing:
    """The drawing of tokens."""

    shape: TreeShape  # how many tokens are drawn, and where
    replacement: bool  # whether a token may be drawn twice below one node
    # (logits, tokens since the root) -> the drafter's law over the target's vocabulary
    law: Callable[[FloatArray, Sequence[int]], Law]
    draws: Draws  # source of randomness
    # (tokens) -> whether each ends an answer; nothing is drawn below such a token
    is_end: Callable[[IntArray], NDArray[np.bool_]] | None = None

    def below(self, law: Law, count: int) -> list[int]:
        """Draws from a law, in order.

        Without replacement each draw is from what the earlier ones left, scaled up: the law of the
        largest of log-probabilities plus Gumbel noise, in order (Kool et al. 2019). They end early where
        the law has fewer tokens; that depends on the law alone.
        """
        if self.replacement:
            return [self.draws.pick(law) for _ in range(count)]
        weights = law.copy()
        drawn: list[int] = []
        while len(drawn) < count and weights.any():
            drawn.append(self.draws.pick(weights))
            weights[drawn[-1]] = 0.0
        return drawn


@runtime_checkable
class DrawingDrafter(Protocol):
    """A drafter that can sample from its distribution."""

    def draw(self, sequence: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A sampled tree below the last token of the sequence; `width` is the most nodes in a draft step."""


@dataclass(frozen=True)
class SampledDrafting(TreeDrafting):
    """Tokens sampled from the drafter's law, with the target's penalties, filters and temperature.

    Args:
        shape: how many tokens are drawn, and where, within limits.
        replacement: whether a token may be drawn twice below one node.
        n_vocab: size of the target's vocabulary.
    """

    shape: Callable[[TreeLimits], TreeShape]
    replacement: bool
    sampler: Sampler
    n_vocab: int
    draws: DrawSource

    def draft(
        self,
        drafter: Drafter,
        sequence: Sequence[int],
        limits: TreeLimits,
        memory: DraftMemory | None = None,
    ) -> DraftedTree:
        del memory  # draws begin anew with every tree
        assert isinstance(drafter, DrawingDrafter), "checked by method_for"

        def law(logits: FloatArray, below: Sequence[int]) -> Law:
            if len(logits) < self.n_vocab:
                missing = np.full(self.n_vocab - len(logits), -np.inf, dtype=np.float32)
                logits = np.concatenate([logits, missing])
            return self.sampler.law(logits, sequence, below)

        draws = self.draws(NoiseStream.DRAFTING, len(sequence))
        drawing = Drawing(self.shape(limits), self.replacement, law, draws, limits.is_end)
        return drafter.draw(sequence, drawing, limits.width)


def grow_drawn(
    root: int, read: Callable[[Frontier], tuple[list[int], FloatArray]], drawing: Drawing, width: int
) -> DraftedTree:
    """A tree sampled level by level.

    Args:
        root: the last token of the sequence.
        read: one draft step: the rows of a frontier that could be read, and their logits, which are
            valid until the next step. Nothing is drawn below a node that could not be read.
        width: most nodes in a draft step.
    """
    growth = _DrawnTree(root, drawing)
    level = [0]
    while level:
        end = len(growth.tokens)
        level = [node for node in level if growth.count(node)]
        for start in range(0, len(level), width):
            step = level[start : start + width]
            rows, logits = read(growth.frontier(step))
            for row, values in zip(rows, logits, strict=True):
                growth.draw_below(step[row], values)
        level = list(range(end, len(growth.tokens)))
    return growth.drafted()


class _DrawnTree:
    """The nodes so far, parents before their children.

    Equal draws below one node become one node. It takes the places of all of them in the shape, and continues
    with everything below those places, so no draw is lost and none is computed twice. Where a law has fewer
    tokens than the shape has places, the first draw takes the remaining places.
    """

    def __init__(self, root: int, drawing: Drawing) -> None:
        self.tokens = [root]
        self._drawing = drawing
        self._parents = [-1]
        self._scores = [0.0]
        self._sequences: list[tuple[int, ...]] = [()]  # tokens since the root
        self._places: list[list[int]] = [[0]]  # the places in the shape that each node takes
        self._drawn: dict[int, list[int]] = {}
        self._laws: dict[int, Law] = {}

    def count(self, node: int) -> int:
        """Return the number of tokens that are drawn below a node."""
        is_end = self._drawing.is_end
        if node and is_end is not None and is_end(np.array([self.tokens[node]], dtype=np.int32))[0]:
            return 0
        return len(self._places_below(node))

    def frontier(self, nodes: Sequence[int]) -> Frontier:
        """The nodes as one draft step reads them."""
        rows = [(node, self.tokens[node], self._parents[node], len(self._sequences[node])) for node in nodes]
        return Frontier(*np.array(rows, dtype=np.int32).T)

    def draw_below(self, node: int, logits: FloatArray) -> None:
        """Add the children of a node."""
        sequence = self._sequences[node]
        law = self._drawing.law(logits, sequence)
        drawn = self._drawing.below(law, self.count(node))
        children: dict[int, int] = {}
        for place, token in zip_longest(self._places_below(node), drawn, fillvalue=drawn[0]):
            if token not in children:
                children[token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
                self._scores.append(self._scores[node] + min(math.log(law[token]), 0.0))
                self._sequences.append((*sequence, token))
                self._places.append([])
            self._places[children[token]].append(place)
        self._drawn[node], self._laws[node] = drawn, law

    def drafted(self) -> DraftedTree:
        return DraftedTree(TokenTree.build(self.tokens, self._parents, self._scores), self._drawn, self._laws)

    def _places_below(self, node: int) -> list[int]:
        return [below for place in self._places[node] for below in self._drawing.shape.below[place]]
