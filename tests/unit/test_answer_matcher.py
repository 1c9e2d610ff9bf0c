"""Structured answers: which tokens may follow in thoughts, grammars and calls, by the real engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.speculation.constraint import Constraint
from edgespec.text.answer_parts import AnswerParts
from edgespec.text.calls.enforceable import closed
from edgespec.text.calls.gemma import spelled as spelled_by_gemma
from edgespec.text.calls.layout import KEY, OPTIONAL_OPENS
from edgespec.text.calls.spelling import LayoutSpelling
from edgespec.text.calls.syntax import GEMMA, GENERIC, HARMONY, LFM2, CallSyntax
from edgespec.text.channels import ChannelParts
from edgespec.text.grammar.schemas import normalized
from edgespec.text.structured_output.answer_matcher import AnswerMatcher
from edgespec.text.structured_output.steps import GrammarStep, Thought, ToolCallGrammar
from edgespec.text.structured_output.token_bytes import TokenBytes
from tests.tiers import examples
from tests.unit.syntaxes import GLM, HERMES, LEARNED, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_CODER, learned

END = 256
MORE = (
    b"</think>",
    b"think>",
    b">\n",
    b">{",
    b"k>\n\n",
    b"l>\n",
    b"l>{",
    b"<tool_call>",
    b'":',
    b"}\n",
    b"]\n",
    b'":"',
)
N_VOCAB = 257 + len(MORE)
CITY = Tool(
    "weather",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
TIME = Tool("time", parameters='{"type": "object", "properties": {}, "additionalProperties": false}')
SYNTAXES = (
    *(HERMES, GENERIC, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_CODER, GLM, HARMONY, GEMMA),
    *(learned(name, template) for name, template in LEARNED.items()),
)
TAGGED = [
    learned(name, LEARNED[name]) for name in ("MINIMAX_2", "MINIMAX_3", "DSML", "SEED_CALLS", "NAMED_TAGS")
]


class Words:
    """Tokens are bytes, the end, and some longer texts that cross the borders of marks."""

    n_tokens = N_VOCAB
    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<end>", *MORE)

    def piece(self, token: int, *, control: bool = False) -> bytes:
        return b"" if token == END else self.tokens[token]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


WORDS = Words()
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(WORDS))
ENDS = np.arange(N_VOCAB) == END


def matcher(answer: GrammarStep) -> Any:
    source = (
        llguidance.LLMatcher.grammar_from_json_schema(answer.text)
        if answer.kind == "json_schema"
        else llguidance.LLMatcher.grammar_from_lark(answer.text)
    )
    found = llguidance.LLMatcher(TOKENIZER, source)
    assert not found.is_error(), found.get_error()
    return found


def taken_apart(syntax: CallSyntax, text: str, tools: Sequence[Tool] = (CITY, TIME)) -> Any:
    """An answer's parts, and what has taken it apart."""
    parts = (
        ChannelParts(calls_tools=True)
        if syntax.in_channels
        else AnswerParts(None, syntax=syntax, tools=tools)
    )
    return parts.push(text) + parts.flush(), parts


def thought(budget: int | None = None, *, opened: bool = True) -> Thought:
    return Thought(b"<think>", b"</think>", opened, budget, "\n</think>\n\n", "\n\n")


def calls(
    syntax: CallSyntax, *tools: Tool, required: bool = False, several: bool = True, before: bytes = b""
) -> ToolCallGrammar:
    tools = tuple(closed(tool) for tool in tools or (CITY, TIME))
    return ToolCallGrammar(
        syntax.trigger.encode(),
        syntax.steps(tools, several=several),
        trigger_in_grammar=syntax.trigger_is_json,
        first_only=syntax.first_only,
        repeats=syntax.repeats and several,
        required=required,
        other_triggers=tuple((mark.encode(), steps) for mark, steps in syntax.more_triggers(tools).items()),
        prompt_end=before,
    )


def answer_matcher(**parts: Any) -> AnswerMatcher:
    return AnswerMatcher(TokenBytes(WORDS), lambda text: list(text.encode()), matcher, **parts)


def constraint(answer: AnswerMatcher) -> Constraint:
    return Constraint(answer, 0, ENDS)


def follow(answer: AnswerMatcher, text: bytes | str) -> list[str]:
    """Bytes that may follow a text of single bytes; "END" is the end."""
    data = text if isinstance(text, bytes) else text.encode()
    permitted = constraint(answer).permitted([], list(data))
    return [
        "END" if token == END else WORDS.tokens[token].decode("latin1") for token in np.flatnonzero(permitted)
    ]


def walk(
    answer: AnswerMatcher, seed: int, most: int = 3000, bias: bytes = b"", marks: Sequence[bytes] = ()
) -> list[int]:
    """Random permitted tokens up to the end.

    Args:
        bias: bytes that come as soon as they may.
        marks: texts that come where they may, at random.
    """
    law = random.Random(seed)
    text: list[int] = []
    rules = constraint(answer)
    liked = list(bias)
    for _ in range(most):
        permitted = rules.permitted(text)
        if not liked and marks and law.random() < 0.6:
            liked = list(law.choice(marks))
        if liked and permitted[liked[0]]:
            text.append(liked.pop(0))
            continue
        liked = liked if bias else []
        choices = np.flatnonzero(permitted)
        printable = [t for t in choices if t == END or t > END or 32 <= t < 127 or t == 10]
        closing = [t for t in printable if t == END or WORDS.tokens[t][:1] in (b"]", b"}")]
        token = int(law.choice((law.random() < 0.5 and closing) or printable or list(choices)))
        if token == END:
            return text
        text.append(token)
    raise AssertionError("no end")


def spelled(tokens: list[int]) -> str:
    return b"".join(map(WORDS.piece, tokens)).decode()


def closing(syntax: CallSyntax) -> tuple[bytes, ...]:
    """The text that ends a section of calls, so that a walk finds its way out."""
    spelling = syntax.spelling
    if isinstance(spelling, LayoutSpelling):
        closes = spelling.layout.closes.replace(OPTIONAL_OPENS, "")
        marks = (closes, closes[closes.rfind("<") :])
        # In free text, a mark that begins with the trigger would lead to another call.
        return tuple(mark.encode() for mark in marks if not mark.startswith(syntax.trigger))
    return (b"]",)


def test_a_thought_is_closed_when_its_budget_is_spent() -> None:
    answer = answer_matcher(thought=thought(5))
    assert len(follow(answer, "Hm, s")) == 1  # after five tokens
    assert follow(answer, "Hm, so"[:5]) == ["\n"]
    assert follow(answer, "Hm, s\n</think>") == ["\n"]
    assert len(follow(answer, "Hm, s\n</think>\n\n")) == N_VOCAB
    assert len(follow(answer, "Hm,")) == N_VOCAB
    # One that is closed in time does not count any more.
    assert len(follow(answer_matcher(thought=thought(9)), "</think>" + "x" * 30)) == N_VOCAB


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert follow(answer_matcher(thought=thought(0)), "") == ["\n"]
    assert follow(answer_matcher(thought=thought(0, opened=False)), "<think>") == ["\n"]
    assert len(follow(answer_matcher(thought=thought(0, opened=False)), "Blue")) == N_VOCAB


def test_a_form_begins_after_the_thought() -> None:
    answer = answer_matcher(thought=thought(), whole=lambda: matcher(GrammarStep('{"const": 7}')))
    assert "END" not in follow(answer, "Let me see")
    assert follow(answer, "Hm</think>") == ["\n"]
    assert follow(answer, "Hm</think>\n\n") == ["7"]
    assert follow(answer, "Hm</think>\n\n7") == ["END"]
    # A token that runs on behind the mark may only bring what fits there.
    after = follow(answer, "Hm</thin")
    assert "k>\n\n" in after
    assert ">{" not in follow(answer, "Hm</think")
    assert ">\n" in follow(answer, "Hm</think")


def test_a_thought_may_be_left_out_before_a_form() -> None:
    answer = answer_matcher(thought=thought(opened=False), whole=lambda: matcher(GrammarStep('{"const": 7}')))
    assert sorted(follow(answer, "")) == ["7", "<"]
    assert follow(answer, "<t") == ["h"]
    assert follow(answer, "7") == ["END"]
    assert len(follow(answer, "<think>")) == N_VOCAB - 1


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_free_text_is_free_until_a_call(syntax: CallSyntax) -> None:
    answer = answer_matcher(calls=calls(syntax))
    assert len(follow(answer, "Blue, I think")) == N_VOCAB
    assert len(follow(answer, f"Blue {syntax.trigger[:-1]}{syntax.trigger[:-1]}")) >= N_VOCAB - 3
    assert len(follow(answer, syntax.trigger)) < 20


def test_tokens_that_run_on_behind_a_trigger_must_fit() -> None:
    after = follow(answer_matcher(calls=calls(QWEN_CODER)), "So <tool_cal")
    assert "l>\n" in after
    assert "l>{" not in after


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("required", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_permitted_is_a_valid_call(syntax: CallSyntax, required: bool, seed: int) -> None:
    answer = answer_matcher(calls=calls(syntax, required=required))
    bias = b"" if required else syntax.trigger.encode()
    text = spelled(walk(answer, seed, bias=bias, marks=closing(syntax)))
    _, parts = taken_apart(syntax, text)
    assert parts.calls
    for call in parts.calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("weather", "time")
        assert arguments == {} if call.name == "time" else arguments["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_single_call_is_followed_by_nothing(syntax: CallSyntax) -> None:
    answer = answer_matcher(calls=calls(syntax, required=True, several=False))
    for seed in range(5):
        said, parts = taken_apart(syntax, spelled(walk(answer, seed)))
        assert len(parts.calls) == 1
        assert not any(part.text for part in said)


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES if each.repeats])
def test_only_calls_follow_a_call_that_is_required(syntax: CallSyntax) -> None:
    for seed in range(4):
        text = walk(answer_matcher(calls=calls(syntax, required=True)), seed, marks=closing(syntax))
        said, parts = taken_apart(syntax, spelled(text))
        assert parts.calls
        assert not any(part.text for part in said)

    def required() -> AnswerMatcher:
        return answer_matcher(calls=calls(syntax, TIME, required=True))

    single = answer_matcher(calls=calls(syntax, TIME, required=True, several=False))
    call = spelled(walk(single, 1, marks=closing(syntax)))
    following = follow(required(), call)
    assert "END" in following
    assert "B" not in following
    assert syntax.spelling is not None
    if syntax.spelling.goes_on:  # further calls come in the same section
        assert isinstance(syntax.spelling, LayoutSpelling)
        more = call.removeprefix(re.match(r"<[^<>]*>", call)[0])  # type: ignore[index]
    else:
        assert {"\n", syntax.trigger[0]} <= set(following)
        assert set(follow(required(), f"{call}\n  \n")) == {"END", syntax.trigger[0]}, "space has an end"
        assert "B" in follow(answer_matcher(calls=calls(syntax, TIME)), call), "text may follow others"
        more = f"\n{call}"
    said, parts = taken_apart(syntax, call + more, [TIME])
    assert follow(required(), call + more) == following
    assert [each.name for each in parts.calls] == ["time", "time"]
    assert not any(part.text for part in said)


@settings(deadline=None)
@given(st.sampled_from(SYNTAXES), st.integers(0, 1 << 20), st.data())
def test_taking_tokens_back_changes_nothing(syntax: CallSyntax, seed: int, data: st.DataObject) -> None:
    def new() -> AnswerMatcher:
        return answer_matcher(thought=thought(4), calls=calls(syntax, required=True))

    text = walk(new(), seed)
    answer = new()
    for _ in range(4):
        size = data.draw(st.integers(0, len(text)))
        assert answer.try_consume_tokens(text[:size]) == size
        fresh = new()
        fresh.try_consume_tokens(text[:size])
        assert answer.compute_logit_bias() == fresh.compute_logit_bias()
        assert answer.is_accepting() == fresh.is_accepting()
        back = data.draw(st.integers(0, size))
        assert answer.rollback(back)
        kept = text[: size - back]
        fresh = new()
        fresh.try_consume_tokens(kept)
        assert answer.compute_logit_bias() == fresh.compute_logit_bias()
        assert answer.rollback(len(kept))


def call_or_form(syntax: CallSyntax) -> AnswerMatcher:
    """A matcher of answers that call a tool, or are an object."""
    schema = {"type": "object", "properties": {"team": {"enum": ["red"]}}, "required": ["team"]}
    return answer_matcher(
        calls=calls(syntax, several=False),
        whole=lambda: matcher(GrammarStep(json.dumps(normalized(schema)))),
    )


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES if not each.in_channels])
def test_an_answer_may_be_a_call_or_have_a_form(syntax: CallSyntax) -> None:
    begins = syntax.trigger.encode()
    for seed, bias in ((1, begins), (2, b'{"team"'), (3, begins), (4, b'{"team"')):
        text = spelled(walk(call_or_form(syntax), seed, bias=bias))
        _, parts = taken_apart(syntax, text)
        if bias == begins:
            assert [call.name in ("weather", "time") for call in parts.calls] == [True]
        else:
            assert json.loads(text) == {"team": "red"}
    assert "END" not in follow(call_or_form(syntax), "")


@pytest.mark.parametrize("syntax", [HERMES, LLAMA])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1 << 20), data=st.data())
def test_tokens_of_either_are_taken_back(syntax: CallSyntax, seed: int, data: st.DataObject) -> None:
    text = walk(call_or_form(syntax), seed)
    answer = call_or_form(syntax)
    for _ in range(4):
        size = data.draw(st.integers(0, len(text)))
        assert answer.try_consume_tokens(text[:size]) == size
        assert answer.try_consume_tokens([ord("~")]) == 0 or answer.rollback(1)
        fresh = call_or_form(syntax)
        fresh.try_consume_tokens(text[:size])
        assert answer.compute_logit_bias() == fresh.compute_logit_bias()
        assert answer.rollback(size)


POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("seed", range(4))
def test_no_argument_is_invented(syntax: CallSyntax, seed: int) -> None:
    """JSON schemas permit further names unless they say otherwise; calls do not."""
    point = Tool("point", parameters=json.dumps({**POINT, "properties": {"x": {"enum": [1]}, "at": POINT}}))
    nothing = Tool("nothing", parameters='{"type": "object", "properties": {}}')
    answer = answer_matcher(calls=calls(syntax, point, nothing, required=True))
    _, parts = taken_apart(syntax, spelled(walk(answer, seed)), (point, nothing))
    assert parts.calls
    for call in parts.calls:
        arguments = json.loads(call.arguments)
        assert set(arguments) <= ({"x", "at"} if call.name == "point" else set()), arguments
        assert set(arguments.get("at", {})) <= {"x"}, arguments


@pytest.mark.parametrize(
    ("schema", "arguments", "permitted"),
    [
        (POINT, {"x": 1}, True),
        (POINT, {"x": 1, "y": 1}, False),
        ({**POINT, "additionalProperties": True}, {"x": 1, "y": 1}, True),
        ({**POINT, "additionalProperties": {"enum": [3]}}, {"x": 1, "y": 3}, True),
        ({"properties": {"at": POINT}}, {"at": {"x": 2, "y": 1}}, False),
        ({"properties": {"at": {"type": "array", "items": POINT}}}, {"at": [{"x": 2, "y": 1}]}, False),
        ({"properties": {"at": {"anyOf": [POINT, {"type": "null"}]}}}, {"at": {"x": 2, "y": 1}}, False),
        (
            {"properties": {"at": {"$ref": "#/$defs/p"}}, "$defs": {"p": POINT}},
            {"at": {"x": 1, "y": 1}},
            False,
        ),
        ({"properties": {"free": {"type": "object"}}}, {"free": {"any": 1}}, True),
        ({"allOf": [POINT, {"properties": {"y": {"enum": [1]}}}]}, {"x": 1, "y": 1}, True),
    ],
)
def test_which_arguments_a_schema_permits(
    schema: dict[str, Any], arguments: dict[str, Any], permitted: bool
) -> None:
    tool = closed(Tool("f", parameters=json.dumps({"type": "object", **schema})))
    answer = matcher(GrammarStep(tool.parameters))
    tokens = list(json.dumps(arguments, separators=(",", ":")).encode())
    assert (answer.try_consume_tokens(tokens) == len(tokens)) is permitted


def test_definitions_of_schemas_are_found() -> None:
    def tool(name: str, kind: str) -> Tool:
        schema = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/thing"}},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"thing": {"enum": [kind]}},
        }
        return Tool(name, parameters=json.dumps(schema))

    for syntax in SYNTAXES:
        tools = (tool("f", "a"), TIME)
        answer = answer_matcher(calls=calls(syntax, *tools, required=True, several=False))
        found = [taken_apart(syntax, spelled(walk(answer, seed)), tools)[1].calls[0] for seed in range(6)]
        assert any(json.loads(call.arguments) == {"x": "a"} for call in found)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_each_tool_keeps_its_own_definitions(syntax: CallSyntax) -> None:
    tools = [
        Tool(
            name,
            parameters=json.dumps(
                {
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/thing"}},
                    "required": ["x"],
                    "$defs": {"thing": {"enum": [kind]}},
                }
            ),
        )
        for name, kind in (("f", "a"), ("g", "b"))
    ]
    answer = answer_matcher(calls=calls(syntax, *tools, required=True, several=False))
    for seed in range(6):
        (call,) = taken_apart(syntax, spelled(walk(answer, seed)), tools)[1].calls
        assert json.loads(call.arguments) == {"x": "a" if call.name == "f" else "b"}


VALUES: dict[str, Any] = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 4},
    "letters": {"type": "string", "pattern": "^[a-f]{2,3}$"},
    "slashed": {"type": "string", "pattern": "a/b"},
    "day": {"type": "string", "format": "date"},
    "word": {"enum": ["C", "F", 7, None, "a::=b"]},
    "number": {"type": "integer", "minimum": 3, "maximum": 40},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "either": {"type": ["string", "integer"], "maxLength": 2},
    "linked": {"$ref": "#/$defs/kind"},
    "inner": {"type": "object", "properties": {"k": {"$ref": "#/$defs/kind"}}, "additionalProperties": False},
}


MARKS = (
    b"\n</parameter>",
    b"</arg_value>",
    b'<|"|>',
    b"<tool_call|>",
    b"a/b",
    b"}",
    b"]",
    b'"',
    b"',",
    b"')",
)


def fits(value: object, name: str) -> bool:
    """True if an argument has the schema that VALUES gives it, written in another way."""
    checks: dict[str, Any] = {
        "text": lambda v: isinstance(v, str),
        "short": lambda v: isinstance(v, str) and 1 <= len(v) <= 4,
        "letters": lambda v: re.fullmatch("[a-f]{2,3}", v),
        "slashed": lambda v: "a/b" in v,
        "day": lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v),
        "word": lambda v: v in ("C", "F", 7, None, "a::=b"),
        "number": lambda v: type(v) is int and 3 <= v <= 40,
        "flag": lambda v: isinstance(v, bool),
        "list": lambda v: len(v) <= 2 and all(isinstance(item, str) and len(item) <= 3 for item in v),
        "maybe": lambda v: v is None or len(v) <= 3,
        "either": lambda v: type(v) is int or len(v) <= 2,
        "linked": lambda v: v in ("a", "b"),
        "inner": lambda v: v == {} or v["k"] in ("a", "b"),
    }
    return bool(checks[name](value))


@pytest.mark.parametrize("syntax", [QWEN_CODER, GLM, GEMMA, *TAGGED, learned("Python", LEARNED["PYTHONIC"])])
@settings(max_examples=examples(80), deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4),
    optional=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_arguments_between_tags_fit_their_schemas(
    syntax: CallSyntax, names: list[str], optional: bool, seed: int
) -> None:
    schema = {
        "type": "object",
        "properties": {name: VALUES[name] for name in names},
        "required": names[:1] if optional else names,
        "$defs": {"kind": {"enum": ["a", "b"]}},
    }
    tools = (Tool("f", parameters=json.dumps(schema)), TIME)
    answer = answer_matcher(calls=calls(syntax, *tools, required=True, several=False))
    layout = syntax.spelling.layout if isinstance(syntax.spelling, LayoutSpelling) else None
    tag = layout.tags.closes if layout is not None and layout.tags is not None else ""
    marks = (*MARKS, *(tag.replace(KEY, name).encode() for name in names if tag))
    found = taken_apart(syntax, spelled(walk(answer, seed, marks=marks)), tools)[1].calls
    assert len(found) == 1
    arguments = json.loads(found[0].arguments)
    if found[0].name == "f":
        assert set(schema["required"]) <= set(arguments) <= set(names)
    for name, value in arguments.items():
        assert fits(value, name), (name, value)


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "node": {"$ref": "#/$defs/node"},
        "pairs": {"type": "array", "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
        "free": {"type": "object"},
        "list": {"type": "array", "maxItems": 2},
        "any": {},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
    },
}


class MarkedWords(Words):
    """The same with a control token for MiniMax's mark."""

    mark = "]<]mark[>["
    n_tokens = N_VOCAB + 1
    special_token_ids = (END, N_VOCAB)
    tokens = (*Words.tokens, b"\xff" + mark.encode())

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        before, *others = data.split(self.mark.encode())
        return [*before, *(token for part in others for token in (N_VOCAB, *part))]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_nested_tags_are_read_as_their_schemas_say(seed: int) -> None:
    syntax = learned("MINIMAX_3", LEARNED["MINIMAX_3"])
    words = MarkedWords()
    tools = (Tool("f", parameters=json.dumps(TREE)),)
    (step,) = syntax.steps(tools, {words.mark: N_VOCAB}, several=False)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(step.text))
    law = random.Random(seed)
    text: list[int] = []
    while not found.is_accepting():
        permitted = np.flatnonzero(np.frombuffer(found.compute_logit_bias(), dtype=np.uint8))
        plain = [t for t in permitted if t < 256 and (32 <= t < 127 or t == 10)]
        marks = [t for t in permitted if t == N_VOCAB or t == ord("]") or t == ord("/")]
        token = int(law.choice((law.random() < 0.5 and marks) or plain or list(permitted)))
        assert found.try_consume_tokens([token]) == 1
        text.append(token)
        assert len(text) < 20_000
    said = b"".join(words.tokens[token].lstrip(b"\xff") for token in text).decode()
    (call,) = taken_apart(syntax, syntax.trigger + said, tools)[1].calls
    arguments = json.loads(call.arguments)
    assert set(arguments) <= set(TREE["properties"])
    assert all(set(pair) <= {1, 2} for pair in arguments.get("pairs", ()))
    kinds = {"node": dict, "pairs": list, "free": dict, "list": list}
    assert all(isinstance(arguments[name], kind) for name, kind in kinds.items() if name in arguments)
    node = arguments.get("node")
    while node is not None:
        assert type(node["v"]) is int
        node = node.get("next")


@pytest.mark.parametrize(
    "values",
    [
        {"node": {"v": 1, "next": {"v": 2, "next": {"v": 3}}}, "pairs": [[1], [], [1, 2]]},
        {"free": {"a": {"b": ["x", {"c": "y"}]}, "d": True}, "list": ["Zürich", {"e": 1}]},
        {"any": {"item": "x", "deep": [[{"f": "<b>"}]]}},
        {"any": "a < b, ] and [ too"},
    ],
)
def test_nested_tags_may_be_written_as_the_template_shows_them(values: dict[str, Any]) -> None:
    syntax = learned("MINIMAX_3", LEARNED["MINIMAX_3"])
    tools = (Tool("f", parameters=json.dumps(TREE)),)
    words = MarkedWords()
    assert isinstance(syntax.spelling, LayoutSpelling)
    text = syntax.spelling.written([("f", values)]).removeprefix(syntax.trigger)
    (step,) = syntax.steps(tools, {words.mark: N_VOCAB}, several=False)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(step.text))
    tokens = words(text)
    assert found.try_consume_tokens(tokens) == len(tokens), found.get_error()
    assert found.is_accepting()
    (call,) = taken_apart(syntax, syntax.trigger + text, tools)[1].calls
    assert json.loads(call.arguments) == values


def test_what_cannot_stand_between_tags_is_said() -> None:
    odd = Tool("f", parameters='{"type": "object", "properties": {"a>b": {}}}')
    with pytest.raises(UsageError, match="is named 'a>b'"):
        GLM.steps([odd], several=False)
    within = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b>c": {}}}}}
    with pytest.raises(UsageError, match="is named 'b>c'"):
        learned("MINIMAX_3", LEARNED["MINIMAX_3"]).steps(
            [Tool("f", parameters=json.dumps(within))], several=False
        )
    deep = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b:c": {}}}}}
    with pytest.raises(UsageError, match="is named 'b:c'"):
        GEMMA.steps([Tool("f", parameters=json.dumps(deep))], several=False)


@pytest.mark.parametrize("syntax", [QWEN_CODER, GLM, GEMMA, LFM2])
@pytest.mark.parametrize("seed", range(3))
def test_a_tool_that_lists_no_arguments_takes_any(syntax: CallSyntax, seed: int) -> None:
    tool = Tool("f", parameters='{"type": "object", "anyOf": [{"required": ["a"]}]}')
    answer = answer_matcher(calls=calls(syntax, tool, required=True, several=False))
    found = taken_apart(syntax, spelled(walk(answer, seed, marks=MARKS)), (tool,))[1].calls
    assert [call.name for call in found] == ["f"]
    assert isinstance(json.loads(found[0].arguments), dict)


NESTED: dict[str, Any] = {
    "tree": {"$ref": "#/$defs/node"},
    "pairs": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"const": "x"}},
            "required": ["b"],
            "additionalProperties": False,
        },
    },
    "counts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    "none": {"type": "array", "maxItems": 0},
    "any": {},
}


@settings(max_examples=examples(80), deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(NESTED)), unique=True, min_size=1, max_size=3),
    optional=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_what_gemma_nests_fits_its_schema(names: list[str], optional: bool, seed: int) -> None:
    import jsonschema

    schema = {
        "type": "object",
        "properties": {name: NESTED[name] for name in names},
        "required": [] if optional else names,
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "null"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    }
    tool = Tool("f", parameters=json.dumps(schema))
    answer = answer_matcher(calls=calls(GEMMA, tool, required=True, several=False))
    said = spelled(walk(answer, seed, marks=MARKS))
    (call,) = taken_apart(GEMMA, said, [tool])[1].calls
    arguments = json.loads(call.arguments)
    jsonschema.validate(arguments, schema)
    again = taken_apart(GEMMA, f"<|tool_call>call:f{spelled_by_gemma(arguments)}<tool_call|>", [tool])[
        1
    ].calls
    assert json.loads(again[0].arguments) == arguments


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,4}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    ),
    st.data(),
)
def test_what_gemma_writes_is_read_back_in_any_pieces(arguments: dict[str, Any], data: st.DataObject) -> None:
    said = f"<|tool_call>call:f{spelled_by_gemma(arguments)}<tool_call|>"
    parts = AnswerParts(None, syntax=GEMMA, tools=[TIME])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        parts.push(said[start:end])
    parts.flush()
    (call,) = parts.calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("begun", "before"),
    [
        ("<|channel|>commentary to", ""),
        ("Let me see.<|end|><|start|>assistant to", ""),
        ("<|channel|>analysis to", ""),
        (" to", "<|start|>assistant"),  # which the prompt ends with
    ],
)
def test_a_name_may_stand_before_the_channel_and_behind_it(begun: str, before: str) -> None:
    answer = answer_matcher(calls=calls(HARMONY, before=before.encode()))
    assert follow(answer, begun) == ["="]
    assert sorted(follow(answer, f"{begun}=functions.")) == ["t", "w"]
    behind = f"{begun}=functions.weather"
    assert "<" in follow(answer, behind)
    kind = "<|channel|>commentary json" if "assistant" in before + begun else " <|constrain|>json"
    said = f'{behind}{kind}<|message|>{{"city":"Oslo"}}'
    assert follow(answer, said) == ["END"]
    _, parts = taken_apart(HARMONY, said)
    assert [(call.name, call.arguments) for call in parts.calls] == [("weather", '{"city":"Oslo"}')]


def test_a_call_may_follow_a_thought_in_channels() -> None:
    analysis = Thought(
        b"<|channel|>analysis<|message|>",
        b"<|end|>",
        opened=False,
        budget=3,
        cut="<|end|><|start|>assistant",
        between="<|start|>assistant",
        must=True,
    )
    answer = answer_matcher(thought=analysis, calls=calls(HARMONY, required=True))
    assert follow(answer, "") == ["<"]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert follow(answer, thought) == ["<"]
    assert follow(answer, f"{thought}<|channel|>commentary to=functions.t") == ["i"]
    free = answer_matcher(thought=analysis, calls=calls(HARMONY))
    assert len(follow(free, thought)) == N_VOCAB
