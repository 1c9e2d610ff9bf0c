"""Earlier answers as a source: propose what followed the last tokens in other answers of the same owner.

Requests of one kind get answers that share long passages (as in SuffixDecoding, Oliaro et al. 2024). The
answers are in memory only, in two generations of suffix automata: when the newer one is full, the older one
is dropped, so nothing is ever deleted from an automaton.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from edgespec.speculation.evidence import CandidateSource
from edgespec.speculation.sources.automaton import SuffixAutomaton
from edgespec.speculation.sources.base import Proposals, Proposer
from edgespec.speculation.sources.text import Continuations
from edgespec.speculation.spliced import behind_seams

ANSWERS_BYTES = 20 << 20  # of memory at most; usual text takes half of it

_GENERATION = 1 << 15  # tokens of all owners
_OWNER_TOKENS = 64  # as many as an automaton takes that is empty
_LEADING = 4  # tokens of the prompt before an answer: by them its first tokens are found
_LONGEST = 32  # tokens of the sequence that are looked for
_SHORTEST = 2

_NOTHING = Continuations(SuffixAutomaton(), (0, 0))

_Generation = dict[Hashable, SuffixAutomaton]


class Answers:
    """The latest answers of an engine, apart by owner: nobody's answer is proposed to another owner."""

    def __init__(self) -> None:
        self._newer: _Generation = {}
        self._older: _Generation = {}
        self._size = 0

    def source(self, owner: Hashable, prompt: Sequence[int]) -> AnswerSource:
        """The source of one more answer, which the answer itself extends as it grows.

        Args:
            owner: whose answers it is drafted from, and who is drafted for from it.
        """
        return AnswerSource(self, owner, behind_seams(prompt)[-_LEADING:])

    def generations(self, owner: Hashable) -> list[SuffixAutomaton]:
        """The automata of an owner's answers, the newer one first."""
        return [kept[owner] for kept in (self._newer, self._older) if owner in kept]

    def extend(
        self, owner: Hashable, automaton: SuffixAutomaton | None, last: int, tokens: Sequence[int]
    ) -> SuffixAutomaton:
        """Append tokens to an answer; returns the automaton that they are in, which changes now and then.

        Args:
            automaton, last: where the answer ends so far; None where it begins.
        """
        if self._size >= _GENERATION:
            self._older, self._newer, self._size = self._newer, {}, 0
        # It is put back when it is whole: an interruption leaves none that is not.
        current = self._newer.pop(owner, None)
        if current is None:
            current = SuffixAutomaton()
            self._size += _OWNER_TOKENS
        current.resume(last if current is automaton else None)
        for token in tokens:
            current.extend(token)
        self._size += len(tokens)
        self._newer[owner] = current
        return current

    def forget(self) -> None:
        self._newer, self._older, self._size = {}, {}, 0


class AnswerSource(Proposer):
    """Proposes for one answer what followed its last tokens in all answers of its owner, itself included."""

    name = "earlier answers"
    source = CandidateSource.ANSWERS

    def __init__(self, answers: Answers, owner: Hashable, leading: Sequence[int]) -> None:
        self._answers = answers
        self._owner = owner
        self._unsaid = leading
        self._automaton: SuffixAutomaton | None = None
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            text = [*self._unsaid, *tokens]
            self._automaton = self._answers.extend(self._owner, self._automaton, self._last, text)
            self._last, self._unsaid = self._automaton.last, ()

    def propose(self, sequence: Sequence[int], depth: int) -> Proposals:
        """Propose what followed the longest ending of the sequence that occurs in a generation."""
        del depth  # the search asks no further than it may go
        ending = behind_seams(sequence)[-_LONGEST:]
        found = [(a, *_followed(a, ending)) for a in self._answers.generations(self._owner)]
        automaton, state, length = max(found, key=lambda each: each[2], default=(None, 0, 0))
        if automaton is None or length < _SHORTEST:
            return _NOTHING
        return Continuations(automaton, (state, length))

    def forget(self) -> None:
        self._answers.forget()


def _followed(automaton: SuffixAutomaton, ending: Sequence[int]) -> tuple[int, int]:
    """The state of the longest suffix of a string that something follows, and its length.

    The string itself may be the last that was added, which nothing follows yet.
    """
    state = length = 0
    for token in ending:
        state, length = automaton.step(state, length, token)
    suffixes = automaton.suffixes(state, length)
    return next((each for each in suffixes if automaton.continuations(each[0])), (0, 0))
