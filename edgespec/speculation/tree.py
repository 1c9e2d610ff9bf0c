"""The token tree: candidate continuations that share prefixes, and what was accepted of it; plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

# llama.cpp distinguishes branches by sequence ids, one per leaf, and supports 256 of them.
MAX_LEAVES = 256

# Parents, depths, scores, and leaves below each node, of a tree that is only its root.
_ROOT = (np.array([-1], dtype=np.int32), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32))
_ROOT_SEQUENCES = (np.zeros(1, dtype=np.int32), np.array([0, 1], dtype=np.int64))


@dataclass(frozen=True)
class TokenTree:
    """Nodes in topological order: parents before their children, the root first.

    The root is the last token of the sequence so far, which the target has not read yet. Every other node
    stands for the sequence on its path from the root.
    """

    tokens: IntArray  # (nodes,) token ids
    parents: IntArray  # (nodes,) index of the parent; -1 for the root
    depths: IntArray  # (nodes,) edges from the root
    # (nodes,) score of the path from the root, a log-probability: 0 for the root, and never above the
    # parent's.
    logprobs: FloatArray

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | IntArray,
        parents: Sequence[int] | IntArray,
        logprobs: Sequence[float] | FloatArray,
    ) -> TokenTree:
        """A tree from tokens, parents and path scores.

        Raises:
            ValueError: the lengths differ, or a parent does not come before its child.
        """
        token_array = np.asarray(tokens, dtype=np.int32)
        parent_array = np.asarray(parents, dtype=np.int32)
        score_array = np.asarray(logprobs, dtype=np.float32)
        n = len(token_array)
        if n == 0 or parent_array.shape != (n,) or score_array.shape != (n,):
            raise ValueError("tokens, parents and logprobs must have one entry per node, at least one")
        if parent_array[0] != -1 or (parent_array[1:] < 0).any():
            raise ValueError("node 0, and only node 0, has no parent")
        if (parent_array >= np.arange(n)).any():
            raise ValueError("a parent must come before its children")
        return cls(token_array, parent_array, _depths(parent_array), score_array)

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """The tree of one node: plain decoding."""
        # Plain decoding makes one for every token, so its constant parts are not computed anew.
        return cls(np.array([token], dtype=np.int32), *_ROOT)

    @classmethod
    def chain(cls, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> TokenTree:
        """A single path; tokens[0] is the root."""
        scores = [0.0] * len(tokens) if logprobs is None else logprobs
        return cls.build(tokens, range(-1, len(tokens) - 1), scores)

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[tuple[Sequence[int], Sequence[float]]]) -> TokenTree:
        """The tree that merges (tokens, path scores) continuations of one root."""
        tokens, parents, scores = [root], [-1], [0.0]
        for path, path_scores in paths:
            parent = 0
            for token, score in zip(path, path_scores, strict=True):
                tokens.append(token)
                parents.append(parent)
                scores.append(score)
                parent = len(tokens) - 1
        return cls.build(tokens, parents, scores).merged()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def expected_accepted(self) -> float:
        """Expected accepted drafted tokens if the scores are right: the sum of the path probabilities."""
        return float(np.exp(self.logprobs[1:]).sum())

    @cached_property
    def leaves(self) -> IntArray:
        """(leaves,) nodes without children, in order."""
        childless = np.ones(len(self), dtype=np.bool_)
        childless[self.parents[1:]] = False
        return np.flatnonzero(childless).astype(np.int32)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
            )
        }

    def child(self, node: int, token: int) -> int | None:
        return self._children.get((node, token))

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = [node]
        while (node := int(self.parents[node])) >= 0:
            path.append(node)
        return path[::-1]

    def below(self, node: int) -> IntArray:
        """A node and all nodes below it, in order."""
        inside = {node}
        for later, parent in enumerate(self.parents[node + 1 :].tolist(), node + 1):  # parents come first
            if parent in inside:
                inside.add(later)
        return np.array(sorted(inside), dtype=np.int32)

    def rerooted(self, node: int) -> TokenTree:
        """Return the part of the tree below `node`, with it as the root, for a sequence that ends there.

        Nodes keep their order, which is that of `below`. Scores are given that the node was accepted.
        """
        kept = self.below(node)
        place = np.full(len(self), -1, dtype=np.int32)
        place[kept] = np.arange(len(kept), dtype=np.int32)
        parents = place[self.parents[kept]]
        parents[0] = -1
        scores = self.logprobs[kept]
        if np.isfinite(scores[0]):  # otherwise nothing is known of what follows
            scores = scores - scores[0]
        return TokenTree.build(self.tokens[kept], parents, scores)

    def merged(self) -> TokenTree:
        """Merge equal prefixes: each path is stored once, with its better score."""
        index: dict[tuple[int, int], int] = {}
        place: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for token, parent, score in zip(
            self.tokens.tolist(), self.parents.tolist(), self.logprobs.tolist(), strict=True
        ):
            key = (place[parent] if parent >= 0 else -1, token)
            node = index.setdefault(key, len(tokens))
            place.append(node)
            if node == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                scores.append(score)
            else:
                scores[node] = max(scores[node], score)
        return self if len(tokens) == len(self) else TokenTree.build(tokens, parents, scores)

    def union(self, other: TokenTree) -> TokenTree:
        """The collective tree of both (SpecInfer, Miao et al. 2024, section 3).

        Raises:
            ValueError: the roots differ.
        """
        if self.tokens[0] != other.tokens[0]:
            raise ValueError("trees of different roots cannot be merged")
        shifted = np.where(other.parents > 0, other.parents + len(self) - 1, 0)
        return TokenTree.build(
            np.concatenate([self.tokens, other.tokens[1:]]),
            np.concatenate([self.parents, shifted[1:]]),
            np.concatenate([self.logprobs, other.logprobs[1:]]),
        ).merged()

    def trimmed(self, budget: int, leaves: int = MAX_LEAVES, depth: int | None = None) -> TokenTree:
        """The best nodes within a budget of nodes (the root counts), leaves and depth.

        Scores never rise along a path, so the best nodes form a tree; ties go to the earlier node, and a
        parent is earlier than its children.
        """
        if (
            len(self) <= budget
            and len(self.leaves) <= leaves
            and (depth is None or self.depths.max() <= depth)
        ):
            return self
        parents = self.parents.tolist()
        kept = {0}
        has_child: set[int] = set()
        n_leaves = 1
        for node in np.argsort(-self.logprobs, kind="stable").tolist():
            if node == 0 or parents[node] not in kept or (depth is not None and self.depths[node] > depth):
                continue
            if len(kept) >= budget:
                break
            # A first child replaces its parent as a leaf; every further child adds one.
            adds_leaf = parents[node] in has_child
            if adds_leaf and n_leaves >= leaves:
                continue
            kept.add(node)
            has_child.add(parents[node])
            n_leaves += adds_leaf
        order = np.array(sorted(kept), dtype=np.int32)
        place = np.full(len(self) + 1, -1, dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return TokenTree.build(self.tokens[order], place[self.parents[order]], self.logprobs[order])

    @cached_property
    def sequences(self) -> tuple[IntArray, NDArray[np.int64]]:
        """The leaves below each node, as (flat leaf numbers, (nodes + 1,) offsets).

        Leaf k of `leaves` is number k. One node is an ancestor of another exactly if it has all of
        the other's leaves; this is how llama.cpp is told the tree.
        """
        if len(self) == 1:
            return _ROOT_SEQUENCES
        member = np.zeros((len(self), len(self.leaves)), dtype=np.bool_)
        nodes, columns = self.leaves, np.arange(len(self.leaves))
        while len(nodes):
            member[nodes, columns] = True
            above = self.parents[nodes]
            nodes, columns = above[above >= 0], columns[above >= 0]
        numbers = np.nonzero(member)[1].astype(np.int32)
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(member.sum(axis=1), out=offsets[1:])
        return numbers, offsets


@dataclass(frozen=True)
class Acceptance:
    """The part of a tree that the target accepted."""

    path: tuple[int, ...]  # the accepted nodes, from the root on
    bonus: int  # the target's token after the last of them


def _depths(parents: IntArray) -> IntArray:
    depths = np.zeros(len(parents), dtype=np.int32)
    above = parents
    while (inside := above >= 0).any():
        depths += inside
        above = np.where(inside, parents[above], -1)
    return depths
