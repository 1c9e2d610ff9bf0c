"""The suffix automaton against a naive search for substrings."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edgespec.speculation.sources.automaton import SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 9), max_size=40)


def _automaton(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def _longest_suffix(string: list[int], text: list[int]) -> list[int]:
    """The longest suffix of a string that occurs in a text."""
    windows = {tuple(text[a:b]) for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    return next((string[a:] for a in range(len(string)) if tuple(string[a:]) in windows), [])


def _followed(string: list[int], text: list[int]) -> Counter[int]:
    """Tokens that follow a string in a text, with their counts."""
    ends = range(len(string), len(text))
    return Counter(text[end] for end in ends if text[end - len(string) : end] == string)


@given(texts)
def test_the_end_is_the_longest_suffix_that_occurs_earlier(text: list[int]) -> None:
    automaton = _automaton(text)
    state, length = automaton.end()
    suffix = _longest_suffix(text[1:], text[:-1]) if text else []
    assert length == len(suffix)
    if suffix:
        assert automaton.continuations(state) == _followed(suffix, text)
    assert len(automaton) == len(text)


@given(texts, st.lists(st.integers(0, 9), max_size=12))
def test_steps_follow_the_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    automaton = _automaton(text)
    state, length = automaton.end()
    string = text[len(text) - length :]
    for token in path:
        state, length = automaton.step(state, length, token)
        string = _longest_suffix([*string, token], text)
        assert length == len(string)
        if string:
            assert automaton.continuations(state) == _followed(string, text)


@given(texts)
def test_suffixes_are_those_that_differ_in_what_follows(text: list[int]) -> None:
    automaton = _automaton(text)
    state, length = automaton.end()
    found = list(automaton.suffixes(state, length))
    assert [size for _, size in found] == sorted({size for _, size in found}, reverse=True)
    for at, size in found:
        assert automaton.continuations(at) == _followed(text[len(text) - size :], text)
    # Between two of them, nothing else follows.
    sizes = [size for _, size in found]
    for size in range(1, length + 1):
        longer = min(other for other in sizes if other >= size)
        ending, longer_ending = text[len(text) - size :], text[len(text) - longer :]
        assert _followed(ending, text) == _followed(longer_ending, text)


@given(texts, texts)
def test_a_text_that_grows_is_like_a_new_one(text: list[int], more: list[int]) -> None:
    grown = _automaton(text)
    for token in more:
        grown.extend(token)
    new = _automaton([*text, *more])
    assert grown.end() == new.end()
    assert grown.states == new.states


@given(texts)
def test_there_are_at_most_two_states_a_token(text: list[int]) -> None:
    assert _automaton(text).states <= max(2 * len(text), 1)


def test_a_text_that_repeats_one_token_takes_time_in_proportion_to_its_length() -> None:
    """Counting in all states would take the square of it: 50 million steps here."""
    automaton = _automaton([7] * 10_000)
    assert automaton.end()[1] == 9_999
    assert automaton.states == 10_001
