"""Answers whose parts have headers or tags of their own, learned from templates that show them so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.text.calls.headers import Headers
from edgespec.text.reading import reader_of
from tests.unit import templates
from tests.unit.answering import ONE, TOOLS, TWO, Call, Served
from tests.unit.syntaxes import FRAMED

SERVED = {name: Served.here(template) for name, template in FRAMED.items()}
NAMES = sorted(SERVED)
THINKING = ["MARKED_RECIPIENTS", "TEXT_TAGS"]


def said(name: str, text: str, **settings: Any) -> tuple[str, str]:
    """The text and the thought of an answer without tools."""
    parts = reader_of(SERVED[name].form, **settings)
    found = [part for letter in text for part in parts.push(letter)] + parts.flush()
    return "".join(part.text for part in found), "".join(part.reasoning for part in found)


def test_headers_are_learned() -> None:
    assert SERVED["RECIPIENTS"].form.headers == Headers(">>>", "", "\n", "all", ends=("<|eot|>",))
    assert SERVED["MARKED_RECIPIENTS"].form.headers == Headers(
        *("<|start|>assistant", " to=", "<|message|>", "user", "self", "<|eom|>"), ends=("<|eom|>", "<|eot|>")
    )


def test_tags_around_texts_are_learned() -> None:
    form = SERVED["TEXT_TAGS"].form
    assert form.thought is not None
    assert (form.thought.opens, form.thought.closes, form.thought.between, form.thought.switch) == (
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        "thinking",
    )
    assert form.text_tags is not None
    assert form.text_tags.text_closes == "<|close|>response<|sep|>"


@pytest.mark.parametrize(
    "name", [n for n in vars(templates) if n.isupper() and n[0] != "_" and n not in FRAMED]
)
def test_other_templates_have_neither(name: str) -> None:
    form = Served.here(getattr(templates, name)).form
    assert (form.headers, form.text_tags) == (None, None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calls", ONE + TWO)
def test_calls_are_read_back(name: str, calls: list[Call]) -> None:
    text, opened = SERVED[name].answer(calls)
    assert SERVED[name].read_back(text, opened=opened) == (calls, "", "")
    assert SERVED[name].read_back(text, opened=opened, cuts=()) == (calls, "", "")


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_no_marks(name: str) -> None:
    text, opened = SERVED[name].answer([], text="Blue,\n\nof >>> course.")
    assert SERVED[name].read_back(text, opened=opened) == ([], "Blue,\n\nof >>> course.", "")
    assert said(name, text, opened=opened) == ("Blue,\n\nof >>> course.", "")


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("calls", [[], *TWO])
def test_thoughts_come_before_texts_and_calls(name: str, calls: list[Call]) -> None:
    text, opened = SERVED[name].answer(calls, thought="Hm,\nso.", text="" if calls else "Blue.")
    assert SERVED[name].read_back(text, opened=opened) == (calls, "" if calls else "Blue.", "Hm,\nso.")


@pytest.mark.parametrize("name", ["RECIPIENTS", "TEXT_TAGS"])
def test_a_text_may_come_before_calls(name: str) -> None:
    text, opened = SERVED[name].answer(TWO[0], text="I look.")
    assert SERVED[name].read_back(text, opened=opened) == (TWO[0], "I look.", "")


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("RECIPIENTS", "Blue.", "Blue."),
        ("RECIPIENTS", "all\nBlue.\n>>> print(1)\n>>>nobody\n", "Blue.\n>>> print(1)\n>>>nobody\n"),
        ("RECIPIENTS", "all\nBlue.>>>all\nOr red.", "Blue.\n\nOr red."),
        ("RECIPIENTS", "always\nblue", "always\nblue"),
        ("MARKED_RECIPIENTS", " Blue.", " Blue."),
        ("MARKED_RECIPIENTS", " to=nobody<|message|>Blue.<|eom|>", "Blue."),
        ("MARKED_RECIPIENTS", " to=you, then", " to=you, then"),
        ("TEXT_TAGS", "Blue.", "Blue."),
        (
            "TEXT_TAGS",
            "<|open|>response<|sep|>Blue.<|close|>response<|sep|>\n<|close|>message<|sep|>",
            "Blue.",
        ),
    ],
)
def test_what_is_no_header_is_text(name: str, text: str, shown: str) -> None:
    assert said(name, text, tools=TOOLS) == (shown, "")


def test_a_text_whose_header_the_prompt_has_is_text_at_once() -> None:
    assert said("RECIPIENTS", "all\nis well", in_text=True) == ("all\nis well", "")
    assert said("MARKED_RECIPIENTS", "Blue.<|eot|>", in_text=True) == ("Blue.", "")
    assert said("MARKED_RECIPIENTS", "Hm.<|eom|><|start|>assistant to=user<|message|>Blue.", opened=True) == (
        *("Blue.", "Hm."),
    )


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
VALUES = st.fixed_dictionaries(
    {}, optional={"city": WORDS.filter(str.strip), "days": st.integers(-99, 99), "on": st.booleans()}
)


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.lists(VALUES, min_size=1, max_size=3), st.data())
def test_any_calls_are_read_in_any_pieces(name: str, values: list[Any], data: st.DataObject) -> None:
    calls: list[Call] = [("get_weather", each) for each in values]
    text, opened = SERVED[name].answer(calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert SERVED[name].read_back(text, opened=opened, cuts=cuts) == (calls, "", "")
