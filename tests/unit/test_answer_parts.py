"""Answers taken apart: the same parts whatever pieces the text comes in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.generation.tools import Tool, ToolCall
from edgespec.text.answer_format import ThoughtFormat
from edgespec.text.answer_parts import AnswerParts, PartsReader, call_id
from edgespec.text.calls.fenced import FenceReader
from edgespec.text.calls.syntax import GEMMA, GENERIC, HARMONY, LFM2, CallSyntax
from edgespec.text.channels import ChannelParts
from tests.unit.syntaxes import (
    GLM,
    HERMES,
    HERMES_OR_FENCES,
    LEARNED,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_CODER,
    learned,
)

THINK = ThoughtFormat("<think>", "</think>")
TOOLS = (
    Tool(
        "f",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "n": {"type": "array"},
                    "any": {},
                    "maybe": {"type": ["string", "null"]},
                    "unit": {"enum": ["C", 7]},
                },
            }
        ),
    ),
    Tool("g"),
)
PARIS, ROME = '{"city": "Paris}]"}', '{"city": "Ro\\"me", "n": [1, {}]}'


def taken_apart(
    pieces: Sequence[str],
    thought: ThoughtFormat | None = None,
    *,
    opened: bool = False,
    budgeted: bool = False,
    syntax: CallSyntax | None = None,
    several: bool = True,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, text and calls; what was streamed and what was kept must agree."""
    fences = FenceReader(TOOLS, several=several) if syntax and syntax.in_fences else None
    parts: PartsReader = AnswerParts(
        thought, opened=opened, budgeted=budgeted, syntax=syntax, tools=TOOLS, fences=fences
    )
    if syntax is HARMONY:
        parts = ChannelParts(opened=opened, calls_tools=True)
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
        ("</think>\n\nBlue.", False, "", "Blue."),
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


ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>so</b>.\n<|end|>"
CALLED = "<|channel|>commentary to=functions.f"


@pytest.mark.parametrize(
    ("text", "reasoning", "said", "calls"),
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Blue.", "Hm, <b>so</b>.", "Blue.", []),
        (f"{ANALYSIS}<|channel|>final<|message|>Blue.\n", "Hm, <b>so</b>.", "Blue.\n", []),
        ("<|channel|>final<|message|>Blue.", "", "Blue.", []),
        ("Blue < <|b|>.", "", "Blue < <|b|>.", []),
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            f"<|start|>assistant{ANALYSIS}"
            f"<|start|>assistant{CALLED} <|constrain|>json<|message|>{PARIS}<|call|>",
            "Hm, <b>so</b>.\n\nHm, <b>so</b>.",
            "I look.",
            [("f", PARIS)],
        ),
        (f" to=functions.f<|channel|>commentary json<|message|>{ROME}", "", "", [("f", ROME)]),
        (f"{CALLED}<|message|>{PARIS[:9]}", "", "", [("f", PARIS[:9])]),
        (f"{CALLED} <|const", "", "", []),
        ("<|channel|>analysis<|message|>Hm <|en", "Hm <|en", "", []),
    ],
)
def test_channels(text: str, reasoning: str, said: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert taken_apart(pieces, syntax=HARMONY) == (reasoning, said, calls)


def test_calls_are_text_where_there_are_no_tools() -> None:
    parts = ChannelParts()
    found = [*parts.push(f"{CALLED}<|message|>{PARIS}<|call|>"), *parts.flush()]
    assert "".join(part.text for part in found) == PARIS
    assert not parts.calls


CALL_F, CALL_G = f'{{"name": "f", "arguments": {PARIS}}}', f'{{"name": "g", "arguments": {ROME}}}'


def fenced(code: str, language: str = "json") -> str:
    return f"```{language}\n{code}\n```"


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
    (
        QWEN_CODER,
        'Sure.\n<tool_call>\n<function=f>\n<parameter=city>\nNew\n <b>"York"</b>\n\n</parameter>\n'
        "<parameter=any>\n7\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n"
        "<parameter=unit>\n7\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
        "</tool_call>",
        "Sure.",
        [("f", r'{"city": "New\n <b>\"York\"</b>\n", "any": 7, "maybe": null, "unit": 7}'), ("g", "{}")],
    ),
    (
        GLM,
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>7\n</arg_value>\n<arg_key>n</arg_key>\n"
        '<arg_value>[1, {}, "</arg_value>"]</arg_value>\n'
        "<arg_key>maybe</arg_key><arg_value>7</arg_value></tool_call>"
        "<tool_call>g\n</tool_call>",
        "",
        [("f", r'{"city": "7\n", "n": [1, {}, "</arg_value>"], "maybe": "7"}'), ("g", "{}")],
    ),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=city>\nPar\n</para", "", [("f", '{"city": "Par')]),
    (
        GEMMA,
        'Sure.\n<|tool_call>call:f{city:<|"|>New "York"\n<|"|>,deep:{a:[{},[],-1.5e3,<|"|>]}<|"|>],b:null},'
        "n:7,yes:true}<tool_call|><|tool_call>call:g{}<tool_call|>",
        "Sure.",
        [
            (
                "f",
                r'{"city": "New \"York\"\n", "deep": {"a": [{}, [], -1.5e3, "]}"], "b": null}, '
                '"n": 7, "yes": true}',
            ),
            ("g", "{}"),
        ],
    ),
    # Not as it was taught, and yet understood.
    (
        GEMMA,
        '<|tool_call> call: f {"city" : "a, {b}", <|"|>n<|"|>: [1 , 2], u:None } <tool_call|> Done.',
        "Done.",
        [("f", '{"city": "a, {b}", "n": [1, 2], "u": "None"}')],
    ),
    (GEMMA, '<|tool_call>call:f{city:<|"|>Par<|', "", [("f", '{"city": "Par')]),
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {PARIS[:9]}', "", [("f", PARIS[:9])]),
    (HERMES, fenced(CALL_F), None, []),
    (HERMES_OR_FENCES, fenced(CALL_F), "", [("f", PARIS)]),
    (HERMES, CALL_F, None, []),
    # An answer that is nothing but calls.
    (HERMES_OR_FENCES, CALL_F, "", [("f", PARIS)]),
    (HERMES_OR_FENCES, f" \n{CALL_F}\n{CALL_G} ", "", [("f", PARIS), ("g", ROME)]),
    (HERMES_OR_FENCES, f"{CALL_F} Done.", None, []),
    (HERMES_OR_FENCES, f"So: {CALL_F}", None, []),
    (HERMES_OR_FENCES, '{"name": "h", "arguments": {}}', None, []),
    (HERMES_OR_FENCES, '{"name": "f", "arguments": {"city": "Par', None, []),
    (HERMES_OR_FENCES, f"Sure:\n\n{fenced(CALL_F)}\n\nDone.\n", "Sure:\n\nDone.", [("f", PARIS)]),
    (HERMES_OR_FENCES, fenced(CALL_F) + "\n" + fenced(CALL_G, ""), "", [("f", PARIS), ("g", ROME)]),
    (HERMES_OR_FENCES, fenced(f"[{CALL_F},\n {CALL_G}]"), "", [("f", PARIS), ("g", ROME)]),
    (HERMES_OR_FENCES, fenced(f"{CALL_F}\n{CALL_G}"), "", [("f", PARIS), ("g", ROME)]),
    (HERMES_OR_FENCES, f"  ```json \n  {CALL_F}```", "", [("f", PARIS)]),
    (HERMES_OR_FENCES, f"```json\n{CALL_F}", "", [("f", PARIS)]),
    (HERMES_OR_FENCES, f"```json\n{CALL_F[:-1]}", None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": {"city": "```"}}'), "", [("f", '{"city": "```"}')]),
    (HERMES_OR_FENCES, fenced('{"name": "h", "arguments": {}}'), None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": []}'), None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": {}, "id": 7}'), None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": {"city": "\\ud800"}}'), None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": {"n": [NaN}}'), None, []),
    (HERMES_OR_FENCES, fenced(f"{CALL_F}\nand so on"), None, []),
    (HERMES_OR_FENCES, fenced('{"name": "f", "arguments": ' + "[" * 100_000), None, []),
    (HERMES_OR_FENCES, fenced(CALL_F, "python"), None, []),
    (HERMES_OR_FENCES, f"It is ```json\n{CALL_F}\n```.", None, []),
    # Behind a fence of text, which has a beginning and an end.
    (HERMES_OR_FENCES, f"```python\nf()\n```\n{CALL_F}\n```\n", None, []),
    (HERMES_OR_FENCES, f"```sh\nls\n```\n{fenced(CALL_F)}", "```sh\nls\n```", [("f", PARIS)]),
    (HERMES_OR_FENCES, f"```xml\n<tool_call>\n{CALL_F}\n</tool_call>\n```", "```xml\n```", [("f", PARIS)]),
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


FENCED = ["```", "json", "\n```json\n", "\n```\n", CALL_F, "\n", " ", "Hm", '{"name":', "[", "]", "`", "py"]


@given(
    st.sampled_from([None, HARMONY, *{syntax.name: syntax for syntax, *_ in ANSWERS}.values()]),
    st.lists(
        st.sampled_from(
            [
                *(
                    "<think>",
                    "</think>",
                    "<tool_call>",
                    "\n",
                    " ",
                    "Hm",
                    "<",
                    "{",
                    '{"name":',
                    "[TOOL_CALLS]",
                ),
                *(
                    "f",
                    ">",
                    "<function=f>",
                    "<parameter=city>",
                    "</parameter>",
                    "</function>",
                    "</tool_call>",
                ),
                *(
                    "<arg_key>any</arg_key>",
                    "<arg_value>",
                    "</arg_value>",
                    "<|channel|>",
                    "analysis",
                    "final",
                ),
                *("<|message|>", "<|end|>", "<|start|>", "to=functions.f"),
                *("```", "json", "\n```json\n", CALL_F, "[", "]", ","),
            ]
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


@given(st.lists(st.sampled_from(FENCED)), st.data())
def test_fences_that_are_no_calls_are_text_and_nothing_is_lost(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    _, said, calls = taken_apart(pieces, syntax=HERMES_OR_FENCES)
    if not calls:
        assert said == text
    without_calls = text
    for _, arguments in calls:
        assert arguments == PARIS
        before, _, without_calls = without_calls.partition(CALL_F)
        assert "".join(before.split()).replace("```", "") in "".join(text.split()).replace("```", "")
    letters = [c for c in text.replace(CALL_F, "", len(calls)) if c.isalpha() and c not in "json"]
    assert [c for c in said if c.isalpha() and c not in "json"] == letters


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_no_arguments(number: str) -> None:
    gemma = f"<|tool_call>call:f{{any:{number}}}<tool_call|>"
    for syntax, answer in ((GEMMA, gemma), (LFM2, f"<|tool_call_start|>[f(any={number})]<|tool_call_end|>")):
        _, _, [(_, arguments)] = taken_apart([answer], syntax=syntax)
        assert json.loads(arguments) == {"any": number}
    code = fenced(f'{{"name": "f", "arguments": {{"any": {number}}}}}')
    assert taken_apart([code], syntax=HERMES_OR_FENCES) == ("", code, [])


def test_nothing_of_a_fence_is_shown_before_it_is_decided() -> None:
    answer = f"So:\n{fenced(CALL_F)}"
    parts = AnswerParts(None, syntax=HERMES_OR_FENCES, tools=TOOLS, fences=FenceReader(TOOLS))
    shown = "".join(part.text for character in answer for part in parts.push(character))
    assert shown == "So:"
    assert [call.name for call in parts.calls] == ["f"]


def test_a_fence_of_other_json_is_shown_as_soon_as_it_is_seen_to_be_no_call() -> None:
    parts = AnswerParts(None, syntax=HERMES_OR_FENCES, tools=TOOLS, fences=FenceReader(TOOLS))
    shown = "".join(part.text for character in '```json\n{"city"' for part in parts.push(character))
    assert shown == '```json\n{"city"'


@pytest.mark.parametrize("last", [CALL_G, CALL_F])
def test_the_first_call_counts_where_one_is_allowed(last: str) -> None:
    text = fenced(f"[{CALL_F}, {CALL_G}]") + f"\nOr:\n{fenced(last)}"
    for pieces in ([text], list(text)):
        said, calls = taken_apart(pieces, syntax=HERMES_OR_FENCES, several=False)[1:]
        assert calls == [("f", PARIS)]
        assert said == f"Or:\n{fenced(last)}"


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


@pytest.mark.parametrize("syntax", [None, HERMES])
def test_a_thought_that_was_cut_off_may_be_closed_again(syntax: CallSyntax | None) -> None:
    text = "<think>Hm.\n</think>\n\n so </th\n</think>Yes."
    for pieces in ([text], list(text)):
        assert taken_apart(pieces, THINK, budgeted=True, syntax=syntax) == ("Hm.", "so </th\nYes.", [])
        assert taken_apart(pieces, THINK, syntax=syntax)[1] == "so </th\n</think>Yes."


MINIMAX, PYTHON = (learned(name, LEARNED[name]) for name in ("MINIMAX_3", "PYTHONIC"))


@pytest.mark.parametrize(
    ("syntax", "begin", "piece", "end", "value"),
    [
        (PYTHON, f"{PYTHON.trigger}f(any='", "wo\\'rd, ", "')]<|call_end|>", "wo'rd, "),
        (GEMMA, '<|tool_call>call:f{any:"', 'wo\\"rd, ', '"}<tool_call|>', 'wo"rd, '),
        (
            QWEN_CODER,
            '<tool_call>\n<function=f>\n<parameter=n>\n["',
            "</parameter>",
            '"]\n</parameter>\n</function>\n</tool_call>',
            ["</parameter>"],
        ),
        (
            QWEN_CODER,
            "<tool_call>\n<function=f>\n<parameter=any>\n<![CDATA[",
            "</parameter>",
            "]]></parameter>\n</function>\n</tool_call>",
            "</parameter>",
        ),
    ],
)
def test_what_is_read_of_a_long_value_is_not_read_again(
    syntax: CallSyntax, begin: str, piece: str, end: str, value: str | list[str]
) -> None:
    count = 300
    parts = AnswerParts(None, syntax=syntax, tools=TOOLS)
    parts.push(begin)
    for _ in range(count):
        parts.push(piece)
        assert len(parts._held) < 100
    parts.push(end)
    parts.flush()
    (call,) = parts.calls
    (read,) = json.loads(call.arguments).values()
    assert read == ([value[0] * count] if isinstance(value, list) else value * count)


def test_what_is_read_of_many_tags_is_not_read_again() -> None:
    values = {"n": ["word", {"a": "b"}] * 50}
    assert MINIMAX.spelling is not None
    parts = AnswerParts(None, syntax=MINIMAX, tools=TOOLS)
    for character in MINIMAX.spelling.written([("f", values)]):
        parts.push(character)
        assert len(parts._held) < 100
    parts.flush()
    assert json.loads(parts.calls[0].arguments) == values


def test_what_is_read_of_a_long_fence_is_not_read_again() -> None:
    text = "```json\n" + CALL_F.replace("Paris", "``` \\" + '"' * 2 * 300)
    fences = FenceReader(TOOLS)
    for end in range(1, len(text)):
        assert fences.decide(text[:end], final=False) is None
        assert fences._end is None or fences._end.at >= end - len("```")


def test_a_quote_that_is_never_closed_ends_with_its_line() -> None:
    text = '```json\n{"name": "f", "arguments": {"city": "Paris}}\n```\nOh.'
    for pieces in ([text], list(text)):
        assert taken_apart(pieces, syntax=HERMES_OR_FENCES) == ("", text, [])
