"""A person's own files as a source: propose what followed the sequence's last tokens there.

Retrieval from a suffix array (REST, He et al. 2024, section 3): the longest ending of the sequence that
occurs in the corpus is found by binary search, and what followed its occurrences is merged into a tree with
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.evidence import CandidateSource, occurrence_class
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.base import MAX_CANDIDATES, Candidates, Proposals, Proposer
from edgespec.speculation.spliced import behind_seams

BREAK = -1  # between files: no token, so nothing matches across it

_SORTED_BY = 32  # tokens that suffixes are sorted by
_LONGEST = 16  # tokens of the sequence that are looked for
_SHORTEST = 2
_MAX_PLACES = 64  # occurrences whose continuations are read

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class CorpusBlock:
    """A part of a corpus that has a suffix array of its own."""

    tokens: Tokens  # (n,) tokens of files, with a BREAK after each
    suffixes: Tokens  # (n,) where suffixes begin, in the order of their tokens


def suffix_array(tokens: Tokens) -> Tokens:
    """Sort the suffixes of a sequence by their first 32 tokens; returns where they begin.

    By prefix doubling (Manber and Myers 1993): sorted by so many tokens, each suffix has a rank, and the pair
    of its rank and that of the suffix so many tokens further sorts by twice as many.
    """
    if not len(tokens):
        return np.zeros(0, dtype=np.int32)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    span = 1
    while True:
        order = np.argsort(ranks, kind="stable")
        if span == _SORTED_BY or int(ranks[order[-1]]) == len(ranks):
            return order.astype(np.int32)
        keys = ranks * (len(ranks) + 1)
        keys[:-span] += ranks[span:]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ranks[order[0]] = 1
        ranks[order[1:]] = 1 + np.cumsum(keys[1:] != keys[:-1])
        span *= 2


class Corpus:
    """Tokens of files, where endings of a sequence are found.

    Args:
        n_vocab: size of the vocabulary. Damaged blocks may hold other numbers, which end what is found.
    """

    def __init__(self, blocks: Sequence[CorpusBlock], n_vocab: int) -> None:
        self._blocks = blocks
        self.n_vocab = n_vocab

    def __len__(self) -> int:
        """Tokens, breaks included."""
        return sum(len(block.tokens) for block in self._blocks)

    def longest(self, sequence: Sequence[int]) -> int:
        """Tokens of the longest ending of a sequence that occurs, up to 16."""
        return max((_longest(block, sequence) for block in self._blocks), default=0)

    def places(self, sequence: Sequence[int], length: int) -> Iterator[tuple[Tokens, int]]:
        """Find where a sequence's ending occurs: a block's tokens, and the place behind the ending there."""
        for block in self._blocks:
            first, behind = _interval(block, sequence[len(sequence) - length :])
            step = max(-(-(behind - first) * len(self._blocks) // _MAX_PLACES), 1)
            for place in block.suffixes[first:behind:step].tolist():
                yield block.tokens, place + length


@dataclass
class _Branch:
    """The continuations of the occurrences of a path."""

    count: int = 0  # occurrences of the path
    below: dict[int, _Branch] = field(default_factory=dict)  # the tokens that follow it


class _Retrieved(Proposals):
    """Continuations of the occurrences of a sequence's ending."""

    def __init__(self, branch: _Branch, matched: int) -> None:
        self._matched = matched
        self._branches = {0: branch}  # node -> what follows it

    def below(self, frontier: Frontier) -> list[Candidates]:
        steps = zip(
            frontier.nodes.tolist(),
            frontier.parents.tolist(),
            frontier.tokens.tolist(),
            frontier.depths.tolist(),
            strict=True,
        )
        found: list[Candidates] = []
        for node, parent, token, depth in steps:
            if node and parent in self._branches:
                branch = self._branches[parent].below.get(token)
                if branch is not None:
                    self._branches[node] = branch
            found.append(self._after(node, self._matched + depth))
        return found

    def _after(self, node: int, matched: int) -> Candidates:
        branch = self._branches.get(node)
        if branch is None:
            return {}
        total = sum(child.count for child in branch.below.values())
        best = sorted(branch.below.items(), key=lambda item: -item[1].count)[:MAX_CANDIDATES]
        return {token: occurrence_class(matched, child.count, total) for token, child in best}


class FileSource(Proposer):
    """Proposes what followed the sequence's last tokens in a corpus."""

    name = "files"
    source = CandidateSource.FILES

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def propose(self, sequence: Sequence[int], depth: int) -> Proposals:
        """Propose what followed the longest ending of the sequence that occurs in the files."""
        ending = behind_seams(sequence)[-_LONGEST:]
        matched = self._corpus.longest(ending)
        root = _Branch()
        if matched >= _SHORTEST:
            for tokens, place in self._corpus.places(ending, matched):
                branch = root
                for token in tokens[place : place + depth].tolist():
                    if not 0 <= token < self._corpus.n_vocab:
                        break  # the file ends here
                    branch = branch.below.setdefault(token, _Branch())
                    branch.count += 1
        return _Retrieved(root, matched)

    def forget(self) -> None:
        """Forget nothing: no sequences are kept."""


def _longest(block: CorpusBlock, sequence: Sequence[int]) -> int:
    """Tokens of a sequence's longest ending that occurs in a block: endings of one that occurs occur too."""
    low, high = 0, min(len(sequence), _LONGEST)
    while low < high:
        length = (low + high + 1) // 2
        ending = list(sequence[len(sequence) - length :])
        first = _first(block, ending)
        occurs = first < len(block.suffixes) and _tokens_at(block, first, length) == ending
        low, high = (length, high) if occurs else (low, length - 1)
    return low


def _interval(block: CorpusBlock, string: Sequence[int]) -> tuple[int, int]:
    """The part of the suffix array whose suffixes begin with a string."""
    wanted = list(string)
    return _first(block, wanted), _first(block, wanted, behind=True)


def _first(block: CorpusBlock, wanted: list[int], *, behind: bool = False) -> int:
    """The rank of the first suffix that is not below a string.

    Args:
        behind: of the first behind those that begin with the string, instead.
    """
    low, high = 0, len(block.suffixes)
    while low < high:
        middle = (low + high) // 2
        found = _tokens_at(block, middle, len(wanted))
        if found < wanted or (behind and found == wanted):
            low = middle + 1
        else:
            high = middle
    return low


def _tokens_at(block: CorpusBlock, rank: int, length: int) -> list[int]:
    """The first tokens of the suffix with that rank."""
    place = int(block.suffixes[rank])
    found: list[int] = block.tokens[place : place + length].tolist()
    return found
