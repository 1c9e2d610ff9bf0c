"""The sequence as a source: propose what followed its last tokens where they occurred before.

Prompt lookup (Saxena 2023) with the longest match instead of a fixed one, and with counts, from a suffix
automaton (as in SuffixDecoding, Oliaro et al. 2024, and SAM Decoding, Hu et al. 2024). Answers that quote,
edit or continue their prompt repeat long stretches of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from edgespec.speculation.evidence import CandidateSource, occurrence_class
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.automaton import SuffixAutomaton
from edgespec.speculation.sources.base import MAX_CANDIDATES, Candidates, Proposals, Proposer
from edgespec.speculation.spliced import seams_of

_MAX_SUFFIXES = 4  # of a context whose continuations are proposed: the shorter ones add little
_MAX_TOKENS = 1 << 17  # of sequences that are indexed at a time, if there is more than one


class Continuations(Proposals):
    """The continuations of earlier occurrences of the end of each path.

    Args:
        root: the state of the sequence's longest suffix that occurs, and its length.
    """

    def __init__(self, automaton: SuffixAutomaton, root: tuple[int, int]) -> None:
        self._automaton = automaton
        self._states = {0: root}  # node -> state and tokens matched

    def below(self, frontier: Frontier) -> list[Candidates]:
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        found: list[Candidates] = []
        for node, parent, token in steps:
            if node:
                self._states[node] = self._automaton.step(*self._states[parent], token)
            found.append(self._after(*self._states[node]))
        return found

    def _after(self, state: int, length: int) -> Candidates:
        """Continuations of a context, each with the evidence of the longest suffix that it followed."""
        found: dict[int, int] = {}
        suffixes = self._automaton.suffixes(state, length)
        # The sequence's own end may be among them, which nothing follows.
        followed = (
            (counts, matched)
            for suffix, matched in suffixes
            if (counts := self._automaton.continuations(suffix))
        )
        for counts, matched in islice(followed, _MAX_SUFFIXES):
            total = sum(counts.values())
            new = [token for token in counts if token not in found]
            if len(new) > 1:
                new.sort(key=lambda token: (-counts[token], token))
            for token in new[: MAX_CANDIDATES - len(found)]:
                found[token] = occurrence_class(matched, counts[token], total)
            if len(found) == MAX_CANDIDATES:
                break
        return found


@dataclass(frozen=True)
class _Index:
    """The index of a sequence."""

    tokens: list[int]
    seams: tuple[int, ...]  # positions in front of which it is divided
    automaton: SuffixAutomaton

    def begins(self, sequence: list[int], seams: tuple[int, ...]) -> bool:
        """True if a sequence begins with this one, and is divided in the same places there."""
        length = len(self.tokens)
        return sequence[:length] == self.tokens and self.seams == tuple(s for s in seams if s < length)


class TextSource(Proposer):
    """Proposes the continuations of earlier occurrences of the sequence's end.

    A sequence is indexed as it grows. Several sequences may take turns: each has an index of its own, and
    those that were not asked for lately are dropped.
    """

    name = "prompt lookup"
    source = CandidateSource.TEXT

    def __init__(self) -> None:
        self._indexes: OrderedDict[int, _Index] = OrderedDict()
        self._numbered = 0

    def propose(self, sequence: Sequence[int], depth: int) -> Continuations:
        """Propose what followed earlier occurrences of the sequence's last tokens."""
        del depth  # the search asks no further than it may go
        index = self._index_of(list(sequence), seams_of(sequence))
        return Continuations(index, index.end())

    def forget(self) -> None:
        self._indexes.clear()

    def _index_of(self, sequence: list[int], seams: tuple[int, ...]) -> SuffixAutomaton:
        """The index of a sequence, which is made from that of its longest known beginning.

        Args:
            seams: positions in front of which it is divided.
        """
        number = max(
            (n for n, index in self._indexes.items() if index.begins(sequence, seams)),
            key=lambda n: len(self._indexes[n].tokens),
            default=None,
        )
        # It is put back when it is whole: an interruption leaves none that is not.
        known = self._indexes.pop(number) if number is not None else _Index([], (), SuffixAutomaton())
        automaton = known.automaton
        for position in range(len(known.tokens), len(sequence)):
            if position in seams:
                automaton.resume()
            automaton.extend(sequence[position])
        self._numbered += 1
        self._indexes[self._numbered] = _Index(sequence, seams, automaton)
        while len(self._indexes) > 1 and sum(len(i.tokens) for i in self._indexes.values()) > _MAX_TOKENS:
            self._indexes.popitem(last=False)
        return automaton
