"""The tree of a text's latest pass, with its tokens spelled out."""

from __future__ import annotations

import numpy as np

from edgespec.engine.loop import DecodingText
from edgespec.generation.result import PassTree
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary


def pass_tree(text: DecodingText, nodes: int, vocabulary: Vocabulary) -> PassTree:
    """The latest tree of a text that is traced.

    Args:
        nodes: of the pass; a pass without drafts has one, and its text has kept no tree.
    """

    def spelled(token: int) -> str:
        return vocabulary.piece(token, control=True).decode("utf-8", "replace")

    if nodes < 2 or text.last_round is None:
        before, last = text.tokens[-2:]
        return PassTree((spelled(before),), (-1,), (1.0,), ("",), (0,), spelled(last))
    tree, accepted = text.last_round
    above = np.where(tree.parents >= 0, tree.logprobs[tree.parents], 0)
    chances = np.exp(np.minimum(tree.logprobs - above, 0))
    return PassTree(
        tokens=tuple(map(spelled, tree.tokens.tolist())),
        parents=tuple(tree.parents.tolist()),
        chances=tuple(round(float(chance), 3) for chance in chances),
        sources=("", *text.proposed_by),
        path=tuple(accepted.path),
        bonus=spelled(accepted.bonus),
    )
