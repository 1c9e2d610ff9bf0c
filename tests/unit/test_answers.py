"""Earlier answers as a source."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources import answers as module
from edgespec.speculation.sources.answers import ANSWERS_BYTES, Answers, AnswerSource
from edgespec.speculation.sources.automaton import SuffixAutomaton


def _said(answers: Answers, owner: Hashable, prompt: Sequence[int], tokens: Sequence[int]) -> AnswerSource:
    source = answers.source(owner, prompt)
    for token in tokens:
        source.extend([token])
    return source


def _proposed(answers: Answers, owner: Hashable, sequence: list[int]) -> set[int]:
    root = [np.array([value], dtype=np.int32) for value in (0, sequence[-1], -1, 0)]
    (found,) = answers.source(owner, []).propose(sequence, 4).below(Frontier(*root))
    return set(found)


def test_the_continuation_of_an_earlier_answer_is_proposed() -> None:
    answers = Answers()
    _said(answers, "a", [1, 2], [3, 4, 5, 6])
    assert _proposed(answers, "a", [9, 4, 5]) == {6}
    assert _proposed(answers, "a", [9, 1, 2]) == {3}, "the first token follows the end of the prompt"
    assert _proposed(answers, "a", [9, 9, 5]) == set(), "one token is no context"
    answers.forget()
    assert _proposed(answers, "a", [9, 4, 5]) == set()


def test_answers_are_never_proposed_to_other_owners() -> None:
    answers = Answers()
    _said(answers, "a", [], [3, 4, 5, 6])
    _said(answers, None, [], [4, 5, 7])
    assert _proposed(answers, "b", [4, 5]) == set()
    assert _proposed(answers, None, [4, 5]) == {7}


def test_answers_that_grow_together_are_drafted_from_each_other() -> None:
    answers = Answers()
    first, second = answers.source("a", []), answers.source("a", [])
    for one, other in zip([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], strict=True):
        first.extend([one])
        second.extend([other])
    assert _proposed(answers, "a", [2, 3]) == {4}
    assert _proposed(answers, "a", [7, 8]) == {9}
    assert _proposed(answers, "a", [4, 9]) == set(), "nothing reaches from one into the other"


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GENERATION", 1000)
    answers = Answers()
    long = answers.source("a", [])
    for start in range(0, 10_000, 10):
        long.extend(range(start, start + 10))  # one answer, over many generations
        assert sum(automaton.states for automaton in answers.generations("a")) < 2 * (1000 + 10) + 2
    assert _proposed(answers, "a", [9_990, 9_991]) == {9_992}
    assert _proposed(answers, "a", [10, 11]) == set()


def test_many_owners_take_no_more_room_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GENERATION", 1000)
    answers = Answers()
    for owner in range(10_000):
        _said(answers, owner, [], [1, 2, 3])
    assert sum(bool(answers.generations(owner)) for owner in range(10_000)) < 40


def test_an_interrupted_answer_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    source = _said(answers, "a", [], [3, 4, 5])

    def interrupted(self: SuffixAutomaton, token: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SuffixAutomaton, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.extend([6])
    assert answers.generations("a") == []
    source.extend([7, 8, 9])
    assert _proposed(answers, "a", [7, 8]) == {9}


def test_the_planned_memory_is_enough() -> None:
    """Tokens of two kinds make about as many states, with as many transitions, as there can be."""
    import tracemalloc

    rng = np.random.default_rng(0)
    tracemalloc.start()
    answers = Answers()
    source = answers.source("a", [])
    while len(answers.generations("a")) < 2:
        source.extend(rng.integers(0, 2, 300).tolist())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2 * peak <= ANSWERS_BYTES
