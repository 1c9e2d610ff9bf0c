"""Answers taken apart: the same parts whatever pieces the text comes in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.generation.tools import ToolCall
from edgespec.models.text.answer_format import ThoughtFormat, answer_format
from edgespec.models.text.answer_parts import AnswerParts, call_id
from edgespec.models.text.call_syntax import GENERIC, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, CallSyntax
from tests.unit import templates

THINK = ThoughtFormat("<think>", "</think>")
HARMONY = answer_format(templates.HARMONY).thought
PARIS, ROME = '{"city": "Paris}]"}', '{"city": "Ro\\"me", "n": [1, {}]}'


def taken_apart(
    pieces: Sequence[str],
    thought: ThoughtFormat | None = None,
    *,
    opened: bool = False,
    syntax: CallSyntax | None = None,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, text and calls; what was streamed and what was kept must agree."""
    parts = AnswerParts(thought, opened=opened, syntax=syntax)
    found = [part for piece in pieces for part in parts.push(piece)] + parts.flush()
    streamed: dict[int, tuple[str, str, str]] = {}
    for part in found:
        if part.call is not None:
            known = streamed.get(part.call.index, ("", "", ""))
            new = (part.call.id, part.call.name, part.call.arguments)
            streamed[part.call.index] = (known[0] + new[0], known[1] + new[1], known[2] + new[2])
    assert [ToolCall(*call) for call in streamed.values()] == parts.calls
    calls = [(call.name, call.arguments) for call in parts.calls]
    return "".join(p.reasoning for p in found), "".join(p.text for p in found), calls


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "said"),
    [
        ("<think>\nHm, so.\n</think>\n\nBlue.", False, "Hm, so.", "Blue."),
        ("\n<think>Hm</think>Blue.\n", False, "Hm", "Blue.\n"),
        ("<think>\n\n</think>\n\nBlue.", False, "", "Blue."),
        ("Blue <think> that </think>.", False, "", "Blue <think> that </think>."),
        ("Hm </thi nk> so\n</think>\n\n Blue.", True, "Hm </thi nk> so", "Blue."),
        ("Hm, cut off </th", True, "Hm, cut off </th", ""),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", ""),
        ("<think>one</think> <think>two</think>", False, "one", "<think>two</think>"),
    ],
)
def test_thoughts(text: str, opened: bool, reasoning: str, said: str) -> None:
    assert taken_apart([text], THINK, opened=opened) == (reasoning, said, [])
    assert taken_apart(list(text), THINK, opened=opened) == (reasoning, said, [])


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Blue.",
        "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Blue.",
    ],
)
def test_channels(text: str) -> None:
    for pieces in ([text], list(text)):
        assert taken_apart(pieces, HARMONY) == ("Hm.", "Blue.", [])
    assert taken_apart(["<|channel|>final<|mess", "age|>Blue."], HARMONY) == ("", "Blue.", [])


ANSWERS = [
    (
        HERMES,
        f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {PARIS}}}\n</tool_call>',
        "Sure.",
        [("f", PARIS)],
    ),
    (
        GENERIC,
        f'<tool_call>{{"name":"f","arguments":{PARIS}}}</tool_call>\n'
        f'<tool_call>\n{{"name": "g", "arguments": {ROME}}}\n</tool_call>\n',
        "",
        [("f", PARIS), ("g", ROME)],
    ),
    (LLAMA, f'{{"name": "f", "parameters": {PARIS}}}', "", [("f", PARIS)]),
    (LLAMA, f'Like so: {{"name": "f", "parameters": {PARIS}}}', None, []),
    (
        MISTRAL,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {PARIS}}}, {{"name": "g", "arguments": {ROME}}}]',
        "",
        [("f", PARIS), ("g", ROME)],
    ),
    (
        MISTRAL_NAMED,
        f"Well.[TOOL_CALLS]f[ARGS]{PARIS}[TOOL_CALLS]g_2[ARGS]{ROME}",
        "Well.",
        [("f", PARIS), ("g_2", ROME)],
    ),
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {PARIS[:9]}', "", [("f", PARIS[:9])]),
    (HERMES, '<tool_call>\n{"name": "f", "argu', "", []),
    (HERMES, "a < b <tool_cal", "a < b <tool_cal", []),
]


@pytest.mark.parametrize(("syntax", "text", "said", "calls"), ANSWERS)
def test_calls(syntax: CallSyntax, text: str, said: str | None, calls: list[tuple[str, str]]) -> None:
    said = text if said is None else said
    assert taken_apart([text], syntax=syntax) == ("", said, calls)
    assert taken_apart(list(text), syntax=syntax) == ("", said, calls)
    thought = f"<think>\nA <tool_call> would do.\n</think>\n\n{text}"
    assert taken_apart([thought], THINK, syntax=syntax) == ("A <tool_call> would do.", said, calls)


@given(
    st.sampled_from([None, *{syntax.name: syntax for syntax, *_ in ANSWERS}.values()]),
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "\n", " ", "Hm", "<", "{", '{"name":', "[TOOL_CALLS]"]
        )
    ),
    st.booleans(),
    st.data(),
)
@example(None, ["<think>", "Hm"], True, None)
def test_parts_do_not_depend_on_how_the_text_is_cut(
    syntax: CallSyntax | None, words: list[str], opened: bool, data: st.DataObject | None
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text))))) if data else [3]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = taken_apart([text], THINK, opened=opened, syntax=syntax)
    assert taken_apart(pieces, THINK, opened=opened, syntax=syntax) == whole


@given(
    st.recursive(
        st.text() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_arguments_end_where_their_brackets_close(value: object) -> None:
    arguments = json.dumps({"x": value})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\nDone.'
    assert taken_apart([text], syntax=HERMES) == ("", "Done.", [("f", arguments)])


def test_ids_of_calls_are_nine_letters_and_differ() -> None:
    ids = [call_id(prompt, index) for prompt in ("a", "b", (1, 2)) for index in range(4)]
    assert len(set(ids)) == 12
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in ids)
    assert ids[0] == call_id("a", 0)
