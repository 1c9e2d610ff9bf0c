"""The list of tokens whose logits a drafter computes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafters.head_shortlist import HeadShortlist

_N = 4096
_RARE = _N - 1


def test_frequent_tokens_and_those_of_the_texts_are_listed() -> None:
    shortlist = HeadShortlist(_N)
    listed = shortlist.listed
    assert listed is not None
    assert listed[0]
    assert not listed[_RARE]
    assert listed.mean() == 0.25
    assert shortlist.note([3, _RARE], chosen=False)
    assert listed[_RARE]
    assert not shortlist.note([3, _RARE], chosen=False), "nothing is new"


def test_texts_that_keep_leaving_the_list_get_all_logits_until_they_stay_in_it() -> None:
    shortlist = HeadShortlist(_N)
    rare = iter(range(_N // 4, _N))
    assert not shortlist.note([1], chosen=True)
    for _ in range(20):
        shortlist.note([next(rare)], chosen=True)
    assert shortlist.listed is None
    changes = [shortlist.note([1], chosen=True) for _ in range(100)]
    assert sum(changes) == 1
    assert shortlist.listed is not None
    assert shortlist.listed[: next(rare)].all(), "what the texts held is listed again"


def test_prompts_do_not_show_what_answers_miss() -> None:
    shortlist = HeadShortlist(_N)
    for token in range(_N // 4, _N // 4 + 100):
        shortlist.note([token], chosen=False)
    assert shortlist.listed is not None


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, _N - 1), max_size=300), max_size=40))
def test_the_list_holds_the_last_text_and_stays_short(texts: list[list[int]]) -> None:
    shortlist = HeadShortlist(_N)
    for text in texts:
        shortlist.note(text, chosen=False)
        listed = shortlist.listed
        assert listed is not None
        assert listed[np.array(text, dtype=np.int64)].all()
        assert listed.sum() <= _N // 4 + _N // 8 + 300
