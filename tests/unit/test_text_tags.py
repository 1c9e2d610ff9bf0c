"""Answers whose thoughts and texts stand between tags, learned from a template that shows them so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.text.reading import reader_of
from tests.unit import templates
from tests.unit.answering import ONE, TOOLS, TWO, Call, Served

SERVED = Served.here(templates.TEXT_TAGS)


def said(text: str, **settings: Any) -> tuple[str, str]:
    """The text and the thought of an answer."""
    parts = reader_of(SERVED.form, **settings)
    found = [part for letter in text for part in parts.push(letter)] + parts.flush()
    return "".join(part.text for part in found), "".join(part.reasoning for part in found)


def test_tags_around_texts_are_learned() -> None:
    form = SERVED.form
    assert form.thought is not None
    assert (form.thought.opens, form.thought.closes, form.thought.between, form.thought.switch) == (
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        "thinking",
    )
    assert form.text_tags is not None
    assert form.text_tags.text_closes == "<|close|>response<|sep|>"


@pytest.mark.parametrize(
    "name", [n for n in vars(templates) if n.isupper() and n[0] != "_" and n != "TEXT_TAGS"]
)
def test_other_templates_have_none(name: str) -> None:
    assert Served.here(getattr(templates, name)).form.text_tags is None


@pytest.mark.parametrize("calls", ONE + TWO)
def test_calls_are_read_back(calls: list[Call]) -> None:
    text, opened = SERVED.answer(calls)
    assert SERVED.read_back(text, opened=opened) == (calls, "", "")
    assert SERVED.read_back(text, opened=opened, cuts=()) == (calls, "", "")


@pytest.mark.parametrize("calls", [[], *TWO])
def test_thoughts_come_before_texts_and_calls(calls: list[Call]) -> None:
    said = "" if calls else "Blue,\n\nof >>> course."
    text, opened = SERVED.answer(calls, thought="Hm,\nso.", text=said)
    assert SERVED.read_back(text, opened=opened) == (calls, said, "Hm,\nso.")


def test_a_text_may_come_before_calls() -> None:
    text, opened = SERVED.answer(TWO[0], text="I look.")
    assert SERVED.read_back(text, opened=opened) == (TWO[0], "I look.", "")


def test_what_has_no_tags_is_text() -> None:
    assert said("Blue.", tools=TOOLS) == ("Blue.", "")
    tagged = "<|open|>response<|sep|>Blue.<|close|>response<|sep|>\n<|close|>message<|sep|>"
    assert said(tagged, tools=TOOLS) == ("Blue.", "")


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
VALUES = st.fixed_dictionaries(
    {}, optional={"city": WORDS.filter(str.strip), "days": st.integers(-99, 99), "on": st.booleans()}
)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3), st.data())
def test_any_calls_are_read_in_any_pieces(values: list[Any], data: st.DataObject) -> None:
    calls: list[Call] = [("get_weather", each) for each in values]
    text, opened = SERVED.answer(calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert SERVED.read_back(text, opened=opened, cuts=cuts) == (calls, "", "")
