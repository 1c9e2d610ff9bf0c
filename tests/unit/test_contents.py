"""Contents and arguments in the forms that clients send, as text and objects that templates take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.api.arguments import arguments_of
from edgespec.api.contents import parts_of, text_of, thought_of, without_thoughts
from edgespec.api.warnings import Warnings

_TEXT = st.text(st.sampled_from('ab"\\\n\u20acé🙂{}[],:'), max_size=6)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(_VALUES, max_size=4), st.booleans(), st.data())
def test_what_was_cut_off_is_completed(values: list[Any], ascii_only: bool, data: st.DataObject) -> None:
    whole = {f"key {n}": value for n, value in enumerate(values)}
    text = json.dumps(whole, ensure_ascii=ascii_only)
    assert arguments_of(text, "f", Warnings()) == whole
    found = arguments_of(text[: data.draw(st.integers(1, len(text)))], "f", Warnings())
    *before, _ = found or {"": None}
    assert {key: found[key] for key in before} == {key: whole[key] for key in before}


def test_a_long_text_that_was_cut_off_takes_no_time() -> None:
    for text in ('{"a": "' + "\\\\" * 200_000, '{"a": ' + "x" * 400_000, "[" * 400_000):
        assert isinstance(arguments_of(text, "f", Warnings()), dict)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ("", {}),
        ("null", {}),
        ({"a": 1}, {"a": 1}),
        ('{"path": "a.txt", "text": "one, two', {"path": "a.txt", "text": "one, two"}),
        ('{"a": "b\\u00', {"a": "b"}),
        ('{"a": tru', {}),
        ('{"a": [1, {"b', {"a": [1, {}]}),
        ("[1]", {"arguments": "[1]"}),
        ("not JSON", {"arguments": "not JSON"}),
        (7, {"arguments": 7}),
    ],
)
def test_arguments_are_an_object(given: object, found: dict[str, Any]) -> None:
    assert arguments_of(given, "f", Warnings()) == found


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("Hi", "Hi"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}, {"type": "output_text", "text": "c"}], "abc"),
        ([{"text": "a"}, {"type": "refusal", "refusal": "No."}], "aNo."),
        ({"temperature": 3}, '{"temperature": 3}'),
        (3.5, "3.5"),
        ([{"type": "tool_reference", "tool_name": "mail"}], "The tool mail is available."),
        ([{"type": "document", "title": "T", "source": {"type": "text", "data": "a"}}], "T\na"),
        (
            [
                {
                    "type": "search_result",
                    "title": "T",
                    "source": "x",
                    "content": [{"type": "text", "text": "a"}],
                }
            ],
            "T\nx\na",
        ),
    ],
)
def test_texts_of_every_form_are_read(content: object, text: str) -> None:
    warnings = Warnings()
    assert text_of(content, warnings) == text
    assert warnings.sentences == ()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "document", "hologram", "text"])
def test_what_is_no_text_becomes_a_note_and_is_named(kind: object) -> None:
    warnings = Warnings()
    said = text_of([{"type": "text", "text": "See "}, {"type": kind}], warnings)
    assert said.startswith("See [")
    assert said.endswith(" was here. This model reads text only.]")
    assert len(warnings.sentences) == 1


def test_thoughts_are_apart_from_what_is_said() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm"},
        {"type": "text", "text": "Hi"},
        {"type": "redacted_thinking"},
    ]
    parts = parts_of(content)
    assert thought_of(parts) == "Hm"
    assert without_thoughts(parts) == parts_of(content[1:2])
    assert thought_of(["Hi"]) == ""
