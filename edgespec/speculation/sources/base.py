"""The interface of sources, and how their candidates join those of a model in a draft step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.speculation.evidence import NOTHING, OTHERS, CandidateSource
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

# Candidates of one node, each with the class of the evidence for it; empty if the source does not know the
# context.
Candidates = Mapping[int, int]

MAX_CANDIDATES = 8  # of one source for one node, counted in sequences
KEPT_OF_ROWS = 32  # tokens after a node that the target found likeliest; when it samples, others follow too
_WIDE = 1 << 32  # more than there are columns


@dataclass(frozen=True)
class TargetRows:
    """The best of the target's logits at nodes of a tree that it has read."""

    nodes: IntArray  # (rows,) the nodes
    tokens: IntArray  # (rows, kept) the likeliest tokens after each, best first
    chances: FloatArray  # (rows, kept) the target's probability of each, at temperature 1, among those kept


class Proposals(Protocol):
    """The proposals of one source at the end of one sequence, looked up as a tree grows there."""

    def below(self, frontier: Frontier) -> Sequence[Candidates]:
        """The candidates below each node of a frontier. A node must come after its parent."""
        ...


class Proposer(Protocol):
    """A source of candidates. It is given the whole sequence every time, and finds out what is new in it."""

    name: str  # as shown to users
    source: CandidateSource  # what its evidence is called
    keeps_passes: bool = False  # whether `observe` is to be called

    def propose(self, sequence: Sequence[int], depth: int) -> Proposals:
        """Proposals for what may follow the sequence.

        Args:
            depth: most tokens of a path that can be used.
        """
        ...

    def observe(self, sequence: Sequence[int], tree: TokenTree, rows: TargetRows) -> None:
        """Keep what the target said in a pass.

        Args:
            sequence: the sequence that the pass extended; the tree's root is its last token.
        """
        del sequence, tree, rows

    def forget(self) -> None:
        """Forget all sequences and passes so far."""


class JoinedProposals:
    """The proposals of several sources."""

    def __init__(self, parts: Sequence[tuple[CandidateSource, Proposals]]) -> None:
        self._parts = parts

    def join(self, frontier: Frontier, children: Children) -> Children:
        """The candidates of a draft step, joined by those that the sources propose for the same nodes.

        Candidates that are there already get the sources' evidence; the others get columns behind them.
        """
        found = [(source, proposals.below(frontier)) for source, proposals in self._parts]
        return _joined(children, [(source, rows) for source, rows in found if any(rows)])


def proposals_of(proposers: Sequence[Proposer], sequence: Sequence[int], depth: int) -> JoinedProposals:
    """The proposals of all these sources."""
    return JoinedProposals([(p.source, p.propose(sequence, depth)) for p in proposers])


def _joined(children: Children, found: Sequence[tuple[CandidateSource, Sequence[Candidates]]]) -> Children:
    if not found:
        return children
    width, listed = children.tokens.shape
    further: list[int] = []  # tokens of candidates that are not listed, row by row
    used = [listed] * width  # columns of each row
    # Where each source's candidates are, row * _WIDE + column, and the class of its evidence.
    said: list[tuple[list[int], list[int]]] = [([], []) for _ in found]
    by_row = zip(children.tokens.tolist(), children.proposed.tolist(), strict=True)
    for row, (in_row, proposed) in enumerate(by_row):
        places = {token: column for column, token in enumerate(in_row) if proposed[column]}
        for (_, rows), (at, kinds) in zip(found, said, strict=True):
            for token, kind in rows[row].items():
                column = places.get(token)
                if column is None:
                    column = places[token] = used[row]
                    further.append(token)
                    used[row] += 1
                at.append(row * _WIDE + column)
                kinds.append(kind)
    columns = max(used, default=listed)
    there = np.arange(columns) < np.array(used)[:, None]
    tokens = np.zeros((width, columns), dtype=np.int32)
    tokens[:, :listed] = children.tokens
    tokens[:, listed:][there[:, listed:]] = further
    logprobs = np.full((width, columns), -np.inf, dtype=np.float32)
    logprobs[:, :listed] = children.logprobs
    evidence = np.full((width, columns, len(CandidateSource)), NOTHING, dtype=np.int8)
    if children.evidence is not None:
        evidence[:, :listed] = children.evidence
    there[:, :listed] = children.proposed
    for (source, rows), (at, kinds) in zip(found, said, strict=True):
        knows = np.array([bool(candidates) for candidates in rows])
        evidence[there & knows[:, None], source] = OTHERS
        rows_of, columns_of = np.divmod(np.array(at), _WIDE)
        evidence[rows_of, columns_of, source] = kinds
    return Children(tokens, logprobs, evidence)
