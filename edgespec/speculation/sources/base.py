"""The interface of sources, and how their candidates join those of a model in a draft step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.speculation.evidence import NOTHING, OTHERS, Source
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

# Candidates of one node, each with the class of the evidence for it; empty if the source does not know the
# context.
Candidates = Mapping[int, int]

MOST_CANDIDATES = 8  # of one source for one node


@dataclass(frozen=True)
class TargetRows:
    """The best of the target's logits at nodes of a tree that it has read.

    Attributes:
        nodes: (rows,) the nodes.
        tokens: (rows, kept) the likeliest tokens after each, best first.
        chances: (rows, kept) the target's probability of each, at temperature 1, among those kept.
    """

    nodes: IntArray
    tokens: IntArray
    chances: FloatArray


class Proposals(Protocol):
    """The proposals of one source at the end of one text, looked up as a tree grows there."""

    def below(self, frontier: Frontier) -> Sequence[Candidates]:
        """The candidates below each node of a frontier. A node must come after its parent."""
        ...


class Proposer(Protocol):
    """A source of candidates. It is given the whole text every time, and finds out what is new in it.

    Attributes:
        name: as shown to users.
        source: what its evidence is called.
        keeps_passes: whether `observe` is to be called.
    """

    name: str
    source: Source
    keeps_passes: bool = False

    def propose(self, text: Sequence[int], depth: int) -> Proposals:
        """Proposals for what may follow the text.

        Args:
            depth: most tokens of a path that can be used.
        """
        ...

    def observe(self, text: Sequence[int], tree: TokenTree, rows: TargetRows) -> None:
        """Keep what the target said in a pass.

        Args:
            text: the text that the pass extended; the tree's root is its last token.
        """
        del text, tree, rows

    def forget(self) -> None:
        """Forget all texts and passes so far."""


class JoinedProposals:
    """The proposals of several sources."""

    def __init__(self, parts: Sequence[tuple[Source, Proposals]]) -> None:
        self._parts = parts

    def join(self, frontier: Frontier, children: Children) -> Children:
        """The candidates of a draft step, joined by those that the sources propose for the same nodes.

        Candidates that are there already get the sources' evidence; the others get columns behind them.
        """
        found = [(source, proposals.below(frontier)) for source, proposals in self._parts]
        return _joined(children, [(source, rows) for source, rows in found if any(rows)])


def proposals_of(proposers: Sequence[Proposer], text: Sequence[int], depth: int) -> JoinedProposals:
    """The proposals of all these sources."""
    return JoinedProposals([(p.source, p.propose(text, depth)) for p in proposers])


def _joined(children: Children, found: Sequence[tuple[Source, Sequence[Candidates]]]) -> Children:
    if not found:
        return children
    width, listed = children.tokens.shape
    further: list[tuple[int, int, int]] = []  # row, column and token of each candidate that is not listed
    said: list[tuple[int, int, int, int]] = []  # row, column, source and class of evidence
    used = [listed] * width  # columns of each row
    by_row = zip(children.tokens.tolist(), children.proposed.tolist(), strict=True)
    for row, (in_row, proposed) in enumerate(by_row):
        places = {token: column for column, token in enumerate(in_row) if proposed[column]}
        for source, rows in found:
            for token, kind in rows[row].items():
                column = places.setdefault(token, used[row])
                if column == used[row]:
                    further.append((row, column, token))
                    used[row] += 1
                said.append((row, column, source, kind))
    more = ((0, 0), (0, max(used, default=listed) - listed))
    tokens = np.pad(children.tokens, more)
    if further:
        rows_of, columns_of, further_tokens = np.array(further).T
        tokens[rows_of, columns_of] = further_tokens
    evidence = np.full((*tokens.shape, len(Source)), NOTHING, dtype=np.int8)
    if children.evidence is not None:
        evidence[:, :listed] = children.evidence
    there = np.arange(tokens.shape[1]) < np.array(used)[:, None]
    there[:, :listed] = children.proposed
    for source, rows in found:
        knows = np.array([bool(candidates) for candidates in rows])
        evidence[there & knows[:, None], source] = OTHERS
    rows_of, columns_of, sources, kinds = np.array(said).T
    evidence[rows_of, columns_of, sources] = kinds
    return Children(tokens, np.pad(children.logprobs, more, constant_values=-np.inf), evidence)
