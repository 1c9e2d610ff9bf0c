"""The branching of a model's running states, found by trying.

How a graph keeps a running state depends on the architecture. Branches are computed where its nodes are
known (see kernels/native/recurrent.cpp), and a graph may mix rows in a node that is not. So two trees are
decoded, the second one after a path of the first, and each row is compared with the one that a chain gives.
The outcome is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import numpy as np

from edgespec.files.small_json import file_stem, remembered
from edgespec.kernels.native.build import sources_digest
from edgespec.llama.cache.state_cache import StateCache
from edgespec.llama.runtime.backend import build_identity
from edgespec.llama.runtime.batch import TokenBatch, tree_batch
from edgespec.llama.runtime.context import BranchesFailed, Context, FloatArray
from edgespec.speculation.tree import TokenTree

ROWS = 16  # of each pass, so that the row count does not choose the kernels
_MAX_ERROR = 1e-3  # a normalized squared error; garbage has 1 or more

# Parents of the first tree's rows: five certain ones, and then branches. The path to row 9 is accepted.
_FIRST = (-1, 0, 1, 2, 3, 4, 4, 6, 5, 7, 6, 9)
_CERTAIN, _LEAF, _ACCEPTED = 5, 11, 8  # of the leaf's path, the last node is rejected
_OTHER_LEAVES = (8, 10)
# The second tree's.
_SECOND = (-1, 0, 0, 2, 2, 3)
_LEAVES = (1, 4, 5)


class BranchExactness(Enum):
    """The outcome of a trial: branches have the bits of chains, differ by rounding, or are wrong."""

    SAME = "same"
    CLOSE = "close"
    WRONG = "wrong"


def try_branches(context: Context) -> BranchExactness:
    """Compare trees with chains. The context must be empty, and is left empty."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, context.model.vocabulary.n_tokens, 64).tolist()
    first = _tree(tokens, _FIRST)
    second = _tree(tokens[len(_FIRST) :], _SECOND)
    try:
        found = _through_trees(context, first, second)
    except BranchesFailed:
        return BranchExactness.WRONG
    finally:
        context.clear()
    sequence = [int(first.tokens[row]) for row in first.path(_LEAF)[:_ACCEPTED]]
    outcomes = [
        _compared(context, found[0][path := first.path(leaf)], _tokens(first, path)) for leaf in _OTHER_LEAVES
    ]
    outcomes += [
        _compared(context, found[1][path := second.path(leaf)], sequence + _tokens(second, path))
        for leaf in _LEAVES
    ]
    order = list(BranchExactness)
    return max(outcomes, key=order.index)


def _through_trees(context: Context, first: TokenTree, second: TokenTree) -> tuple[FloatArray, FloatArray]:
    cache = StateCache(context, ordered=True)
    found = []
    for tree, certain in ((first, _CERTAIN), (second, 1)):
        cache.try_branches(tree_batch(tree, cache.length), ROWS, certain)
        assert cache.placement is not None
        found.append(np.array(cache.placement.select(context.logits())))
        leaf = tree.leaves.tolist().index(_LEAF if tree is first else _LEAVES[0])
        cache.commit(leaf, _ACCEPTED if tree is first else 1, len(tree.leaves), len(tree))
    return found[0], found[1]


def _tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree.build(tokens[: len(parents)], parents, [0.0] * len(parents))


def _tokens(tree: TokenTree, path: Sequence[int]) -> list[int]:
    return [int(tree.tokens[row]) for row in path]


def _compared(context: Context, rows: FloatArray, sequence: Sequence[int]) -> BranchExactness:
    """Compare the last rows of a sequence with those of a chain."""
    try:
        filled = [*sequence, *[sequence[0]] * (ROWS - len(sequence))]
        context.decode(TokenBatch.run(filled, 0, n_sequences=1, logits="all"))
        expected = context.logits()[: len(sequence)][-len(rows) :]
        if np.array_equal(rows, expected):
            return BranchExactness.SAME
        error = float(np.square(rows - expected).sum() / np.square(expected - expected.mean()).sum())
        return BranchExactness.CLOSE if error < _MAX_ERROR else BranchExactness.WRONG
    finally:
        context.clear()


class BranchingStore:
    """Outcomes of earlier: a small file for each model, its way of being held, llama.cpp build and CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, fingerprint: str, held: str, context: Context) -> BranchExactness:
        """The outcome for a model: remembered, or found now and saved.

        Args:
            fingerprint: of the model's header.
            held: what else determines its kernels: the layout of its weights, layers on a GPU.
        """
        identity = f"branching {fingerprint} {held} {build_identity()} {sources_digest()}"
        path = self._folder / (file_stem(fingerprint, identity) + ".json")
        return remembered(
            path,
            lambda kept: BranchExactness(kept["branching"]),
            lambda: try_branches(context),
            lambda outcome: {"branching": outcome.value},
        )
