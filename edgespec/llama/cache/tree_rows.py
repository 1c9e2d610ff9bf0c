"""The rows by which a tree is decoded."""

from __future__ import annotations

import numpy as np

from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.tree import TokenTree


def tree_batch(tree: TokenTree, start: int) -> TokenBatch:
    """The rows that decode a tree with its root at position `start`, with logits for every node."""
    numbers, offsets = tree.sequences
    return TokenBatch(
        tokens=tree.tokens,
        positions=tree.depths + start,
        sequence_ids=numbers,
        offsets=offsets,
        wants_logits=np.ones(len(tree), dtype=np.bool_),
    )
