"""Prompt lookup against a slow search through the text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.speculation.drafters.proposing import lookup_drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import ByProbability
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import assert_well_formed, texts_of

_RANKING = ByProbability()  # nothing is ranked: there are no logits
_WIDE = TreeLimits(budget=10_000, depth=4, leaves=256)
_CHANCE = {1: 0.15, 2: 0.4, 3: 0.6, 4: 0.75}
_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60) | st.lists(
    st.integers(0, 12), min_size=1, max_size=60
)


def _draft(text: list[int], limits: TreeLimits = _WIDE) -> TokenTree:
    return lookup_drafter().draft(text, limits, _RANKING)


def _found(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """What followed the 7 latest earlier occurrences of each ending of the text, with its score.

    Given its parent, a token is as likely as the longest match that proposes it.
    """
    longest: dict[tuple[int, ...], int] = {}
    for length in range(1, min(4, len(text) - 1) + 1):
        ending = text[-length:]
        places = [end for end in range(length, len(text)) if text[end - length : end] == ending]
        for place in places[-7:]:
            for i, _ in enumerate(text[place : place + depth]):
                path = (text[-1], *text[place : place + i + 1])
                longest[path] = max(longest.get(path, 0), min(length + i, 4))
    found: dict[tuple[int, ...], float] = {(text[-1],): 0.0}
    for path in sorted(longest, key=len):
        found[path] = found[path[:-1]] + math.log(_CHANCE[longest[path]])
    return found


@given(_TEXTS, st.integers(1, 6))
def test_drafts_what_followed_earlier_occurrences(text: list[int], depth: int) -> None:
    tree = _draft(text, TreeLimits(budget=10_000, depth=depth))
    assert_well_formed(tree)
    expected = _found(text, depth)
    drafted = texts_of(tree)
    assert drafted.keys() == expected.keys()
    assert drafted == {path: pytest.approx(score, rel=1e-5) for path, score in expected.items()}


@given(
    text=_TEXTS,
    budget=st.integers(1, 20),
    depth=st.integers(0, 8),
    leaves=st.integers(1, 4),
    least=st.sampled_from([-math.inf, -3.0, -1.0, -0.2, 0.0]),
)
def test_limits_are_kept(text: list[int], budget: int, depth: int, leaves: int, least: float) -> None:
    tree = _draft(text, TreeLimits(budget, depth, leaves, min_logprob=least))
    assert_well_formed(tree)
    assert len(tree) <= budget
    assert tree.depths.max() <= depth
    assert len(tree.leaves) <= leaves
    assert (tree.logprobs[1:] > least).all()


@given(_TEXTS, st.integers(2, 20), st.floats(-4, 0))
def test_the_best_continuations_fill_the_budget(text: list[int], budget: int, least: float) -> None:
    tree = _draft(text, TreeLimits(budget, depth=5, min_logprob=least))
    good = [score for path, score in _found(text, 5).items() if len(path) == 1 or score > least + 1e-6]
    close = [score for path, score in _found(text, 5).items() if abs(score - least) <= 1e-6]
    assert min(len(good), budget) <= len(tree) <= min(len(good) + len(close), budget)
    assert sorted(tree.logprobs.tolist(), reverse=True)[: len(good)] == pytest.approx(
        sorted(good, reverse=True)[:budget], rel=1e-5
    )


@given(st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 2), max_size=8)), max_size=8))
def test_a_rewound_or_replaced_text_is_drafted_like_a_new_one(
    edits: list[tuple[int, list[int]]],
) -> None:
    drafter = lookup_drafter()
    text = [0]
    for keep, new in edits:
        text = [*text[: max(keep, 1)], *new]
        assert texts_of(drafter.draft(text, _WIDE, _RANKING)) == texts_of(_draft(text))


@given(_TEXTS)
def test_a_text_that_grows_token_by_token_is_drafted_like_a_new_one(text: list[int]) -> None:
    drafter = lookup_drafter()
    for end in range(1, len(text) + 1):
        grown = drafter.draft(text[:end], _WIDE, _RANKING)
    assert texts_of(grown) == texts_of(_draft(text))


def test_the_callers_text_may_change_after_the_call() -> None:
    drafter = lookup_drafter()
    text = [1, 2, 3, 1]
    drafter.draft(text, _WIDE, _RANKING)
    text[0] = 9
    assert texts_of(drafter.draft(text, _WIDE, _RANKING)) == texts_of(_draft(text))


def test_the_longest_match_comes_first() -> None:
    #      a longer match    a later, shorter one
    text = [1, 2, 3, 4, 70, 9, 9, 4, 80, 9, 1, 2, 3, 4]
    tree = _draft(text, TreeLimits(budget=2))
    assert texts_of(tree) == {(4,): 0, (4, 70): pytest.approx(math.log(0.75))}


def test_matches_share_their_common_beginning() -> None:
    text = [5, 1, 2, 3, 5, 1, 2, 4, 5]
    tree = _draft(text, TreeLimits(budget=100, depth=3))
    assert set(texts_of(tree)) == {(5,), (5, 1), (5, 1, 2), (5, 1, 2, 3), (5, 1, 2, 4)}


@pytest.mark.parametrize("text", [[1], [1, 2, 3], [3, 3, 1]])
def test_nothing_is_drafted_where_nothing_matches(text: list[int]) -> None:
    assert texts_of(_draft(text)) == {(text[-1],): 0}


def test_never_proposes_past_the_text() -> None:
    assert set(texts_of(_draft([8, 8], TreeLimits(100, depth=9)))) == {(8,), (8, 8)}


@pytest.mark.parametrize("limits", [TreeLimits(1), TreeLimits(9, depth=0)])
def test_plain_decoding_is_the_root(limits: TreeLimits) -> None:
    assert texts_of(_draft([1, 1, 1], limits)) == {(1,): 0}
