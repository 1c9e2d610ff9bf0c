"""Hypothesis strategies for token trees, and simple reference functions on trees."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from edgespec.speculation.tree import TokenTree

SHAPES = ("chain", "star", "random", "near the end", "caterpillar")


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 300, vocabulary: int = 5, root: int | None = None) -> TokenTree:
    """Trees of any shape. Siblings may hold equal tokens; scores never rise along a path, and often tie."""
    n = draw(st.integers(1, max_nodes))
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parents = [-1]
    for node in range(1, n):
        lowest = {"chain": node - 1, "star": 0, "random": 0, "near the end": max(node - 4, 0)}
        if shape == "caterpillar":
            parents.append(node - 2 if node % 2 == 0 else node - 1)
        else:
            parents.append(int(rng.integers(lowest[shape], 1 if shape == "star" else node)))
    tokens = rng.integers(0, vocabulary, n)
    if root is not None:
        tokens[0] = root
    steps = rng.choice([0.0, 0.25, 0.5, 2.0], n)
    scores = [0.0]
    for node in range(1, n):
        scores.append(scores[parents[node]] - steps[node])
    return TokenTree.build(tokens, parents, scores)


def distinct_trees(max_nodes: int = 300, vocabulary: int = 5) -> st.SearchStrategy[TokenTree]:
    """Trees in which no two siblings hold the same token, as drafters make them."""
    return trees(max_nodes, vocabulary).map(TokenTree.merged)


def text_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens on the path from the root to a node."""
    return tuple(int(tree.tokens[i]) for i in tree.path(node))


def texts_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every path of a tree as its tokens, with its best score."""
    texts: dict[tuple[int, ...], float] = {}
    for node in range(len(tree)):
        text = text_of(tree, node)
        texts[text] = max(texts.get(text, -np.inf), float(tree.logprobs[node]))
    return texts


def ancestry(tree: TokenTree) -> np.ndarray:
    """(nodes, nodes) bool: whether the column is the row itself or one of its ancestors."""
    related = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        related[node, tree.path(node)] = True
    return related


def assert_well_formed(tree: TokenTree) -> None:
    """The invariants of a tree: parents first, right depths, falling scores, distinct siblings."""
    assert tree.parents[0] == -1
    assert tree.depths[0] == 0
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.logprobs[node] <= tree.logprobs[parent]
    assert len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree)
