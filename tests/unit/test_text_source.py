"""The text as a source, against a slow search through it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.evidence import NOTHING, CandidateSource, alone_logits, occurrence_class
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.sources import text as source_module
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import assert_well_formed, texts_of

_RANKING = ProbabilityRanking()  # nothing is ranked: there are no logits
_WIDE = TreeLimits(budget=10_000, depth=4, leaves=256)
_SUFFIXES, _EACH = 4, 8  # how many are asked, and how many candidates there are at most
_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=50) | st.lists(
    st.integers(0, 12), min_size=1, max_size=50
)


def _drafter() -> ProposingDrafter:
    return ProposingDrafter([TextSource()])


def _draft(text: list[int], limits: TreeLimits = _WIDE) -> TokenTree:
    return _drafter().draft(text, limits, _RANKING)


def _followed(string: list[int], text: list[int]) -> Counter[int]:
    ends = range(len(string), len(text))
    return Counter(text[end] for end in ends if text[end - len(string) : end] == string)


def _candidates(context: list[int], text: list[int]) -> dict[int, float]:
    """Continuations of a context's ends in the text, with the score by the longest end that each followed."""
    found: dict[int, float] = {}
    seen: list[Counter[int]] = []
    for length in range(len(context), 0, -1):
        counts = _followed(context[-length:], text)
        if not counts or counts in seen[-1:]:
            continue  # it says nothing, or the same as a longer one
        seen.append(counts)
        if len(seen) > _SUFFIXES:
            break
        new = sorted(counts.keys() - found.keys(), key=lambda token: (-counts[token], token))
        for token in new[: _EACH - len(found)]:
            kind = occurrence_class(length, counts[token], counts.total())
            evidence = np.full((1, 1, len(CandidateSource)), NOTHING, np.int8)
            evidence[..., CandidateSource.TEXT] = kind
            found[token] = -math.log1p(math.exp(-alone_logits(evidence).max()))
    return found


def _found(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """Every path below the text's last token that its own earlier parts propose, with its score."""
    found: dict[tuple[int, ...], float] = {(text[-1],): 0.0}
    layer = dict(found)
    for _ in range(depth):
        layer = {
            (*path, token): score + edge
            for path, score in layer.items()
            for token, edge in _candidates([*text[:-1], *path], text).items()
        }
        found |= layer
    return found


@settings(max_examples=40)
@given(_TEXTS, st.integers(1, 3))
@example([1, 0, 1, 1, 1, 1, 1], 2)  # an end that nothing follows takes no other's place
def test_drafts_what_followed_earlier_occurrences(text: list[int], depth: int) -> None:
    tree = _draft(text, TreeLimits(budget=10_000, depth=depth, leaves=10_000))
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


@given(st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 2), max_size=8)), max_size=8))
def test_a_rewound_or_replaced_text_is_drafted_like_a_new_one(edits: list[tuple[int, list[int]]]) -> None:
    drafter = _drafter()
    text = [0]
    for keep, new in edits:
        text = [*text[: max(keep, 1)], *new]
        assert texts_of(drafter.draft(text, _WIDE, _RANKING)) == texts_of(_draft(text))


@given(_TEXTS)
def test_a_text_that_grows_token_by_token_is_drafted_like_a_new_one(text: list[int]) -> None:
    drafter = _drafter()
    for end in range(1, len(text) + 1):
        grown = drafter.draft(text[:end], _WIDE, _RANKING)
    assert texts_of(grown) == texts_of(_draft(text))


def test_the_callers_text_may_change_after_the_call() -> None:
    drafter = _drafter()
    text = [1, 2, 3, 1]
    drafter.draft(text, _WIDE, _RANKING)
    text[0] = 9
    assert texts_of(drafter.draft(text, _WIDE, _RANKING)) == texts_of(_draft(text))


def test_the_longest_match_comes_first() -> None:
    #      a longer match    a later, shorter one
    text = [1, 2, 3, 4, 70, 9, 9, 4, 80, 9, 1, 2, 3, 4]
    assert list(texts_of(_draft(text, TreeLimits(budget=2)))) == [(4,), (4, 70)]


def test_what_followed_more_often_comes_first() -> None:
    text = [5, 6, 7, 1, 5, 6, 8, 2, 5, 6, 7, 3, 5, 6]
    assert set(texts_of(_draft(text, TreeLimits(budget=2, depth=1)))) == {(6,), (6, 7)}


def test_texts_that_take_turns_keep_their_indexes() -> None:
    source = TextSource()
    texts = [[1, 2, 3] * 20, [4, 5] * 20, [1, 2, 3] * 20 + [9]]
    first = [source._index_of(text, ()) for text in texts]
    assert first[0] is first[2], "it continues where the first one ends"
    assert source._index_of([4, 5] * 20 + [4], ()) is first[1]
    assert source._index_of([4, 5] * 20 + [4], (7,)) is not first[1], "it is divided elsewhere"
    assert len(source._indexes) == 3
    source.forget()
    assert source._index_of([4, 5] * 20, ()) is not first[1]


def test_texts_that_were_not_asked_for_lately_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_MAX_TOKENS", 100)
    source = TextSource()
    for first in range(8):
        source.propose([first] * 40, 4)
    assert len(source._indexes) == 2
    source.propose([9] * 500, 4)
    assert len(source._indexes) == 1, "the text in hand is never dropped"


@pytest.mark.parametrize("text", [[1], [1, 2, 3], [3, 3, 1]])
def test_nothing_is_drafted_where_nothing_matches(text: list[int]) -> None:
    assert texts_of(_draft(text)) == {(text[-1],): 0}


def test_a_token_that_repeats_is_drafted_as_often_as_there_is_room() -> None:
    assert set(texts_of(_draft([8, 8], TreeLimits(100, depth=5)))) == {(8,) * n for n in range(1, 7)}


@pytest.mark.parametrize("limits", [TreeLimits(1), TreeLimits(9, depth=0)])
def test_plain_decoding_is_the_root(limits: TreeLimits) -> None:
    assert texts_of(_draft([1, 1, 1], limits)) == {(1,): 0}
