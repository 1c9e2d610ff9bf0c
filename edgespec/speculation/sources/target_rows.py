"""Rows for sources to keep of a pass: the likeliest tokens after each node, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.speculation.sources.base import KEPT_OF_ROWS, Proposer, TargetRows
from edgespec.speculation.top import top
from edgespec.speculation.tree import FloatArray, TokenTree

_MOST_ROWS = 64  # of a pass: more would take a share of it that shows


def observed(
    proposers: Sequence[Proposer], sequence: Sequence[int], tree: TokenTree, logits: FloatArray
) -> None:
    """Show a pass to the sources that keep something of passes.

    Args:
        sequence: the sequence that the pass extended; the tree's root is its last token.
        logits: (nodes, n_vocab) the target's; they are read only.
    """
    keeping = [proposer for proposer in proposers if proposer.keeps_passes]
    if keeping:
        rows = target_rows(tree, logits)
        for proposer in keeping:
            proposer.observe(sequence, tree, rows)


def target_rows(tree: TokenTree, logits: FloatArray) -> TargetRows:
    """The best of the logits at the likeliest nodes of a tree, the root first."""
    nodes = np.arange(len(tree), dtype=np.int32)
    if len(nodes) > _MOST_ROWS:
        nodes = np.argsort(-tree.logprobs, kind="stable")[:_MOST_ROWS].astype(np.int32)
    values, tokens = top(logits if len(nodes) == len(logits) else logits[nodes], KEPT_OF_ROWS)
    with np.errstate(invalid="ignore"):  # rows that are not finite are of no use, and no error of this part
        chances = np.exp(values - values[:, :1])
        chances /= chances.sum(axis=1, keepdims=True)
    return TargetRows(nodes, tokens, chances)
