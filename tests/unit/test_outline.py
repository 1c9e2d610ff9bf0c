"""Outlines: which tokens may follow in thoughts, forms and calls, with the real grammar engine."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.models.text.answer_parts import AnswerParts
from edgespec.models.text.call_syntax import GENERIC, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, CallSyntax
from edgespec.models.text.outline import Outline
from edgespec.models.text.outline_steps import Calls, Thought
from edgespec.models.text.pieces import Pieces
from edgespec.speculation.constraint import Constraint

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
SYNTAXES = (HERMES, GENERIC, LLAMA, MISTRAL, MISTRAL_NAMED)


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


def matcher(schema: str) -> Any:
    return llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_json_schema(schema))


def thought(budget: int | None = None, *, opened: bool = True) -> Thought:
    return Thought(b"<think>", b"</think>", opened, budget, "\n</think>\n\n", "\n\n")


def calls(syntax: CallSyntax, *, required: bool = False, several: bool = True) -> Calls:
    return Calls(
        syntax.trigger.encode(),
        syntax.steps([CITY, TIME], several=several),
        fed=syntax.trigger_is_json,
        first_only=syntax.first_only,
        repeats=syntax.repeats and several,
        required=required,
    )


def outline(**parts: Any) -> Outline:
    return Outline(Pieces(WORDS), lambda text: list(text.encode()), matcher, **parts)


def constraint(form: Outline) -> Constraint:
    return Constraint(form, 0, ENDS)


def follow(form: Outline, text: bytes | str) -> list[str]:
    """What may follow a text of single bytes; "END" is the end."""
    data = text if isinstance(text, bytes) else text.encode()
    permitted = constraint(form).permitted([], list(data))
    return [
        "END" if token == END else WORDS.tokens[token].decode("latin1") for token in np.flatnonzero(permitted)
    ]


def walk(form: Outline, seed: int, most: int = 400, bias: bytes = b"") -> list[int]:
    """Random permitted tokens up to the end; where bytes of `bias` may follow, they do."""
    law = random.Random(seed)
    text: list[int] = []
    rules = constraint(form)
    liked = list(bias)
    for _ in range(most):
        permitted = rules.permitted(text)
        if liked and permitted[liked[0]]:
            text.append(liked.pop(0))
            continue
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


def test_a_thought_is_closed_when_its_budget_is_spent() -> None:
    form = outline(thought=thought(5))
    assert len(follow(form, "Hm, s")) == 1  # after five tokens
    assert follow(form, "Hm, so"[:5]) == ["\n"]
    assert follow(form, "Hm, s\n</think>") == ["\n"]
    assert len(follow(form, "Hm, s\n</think>\n\n")) == N_VOCAB
    assert len(follow(form, "Hm,")) == N_VOCAB
    # One that is closed in time does not count any more.
    assert len(follow(outline(thought=thought(9)), "</think>" + "x" * 30)) == N_VOCAB


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert follow(outline(thought=thought(0)), "") == ["\n"]
    assert follow(outline(thought=thought(0, opened=False)), "<think>") == ["\n"]
    assert len(follow(outline(thought=thought(0, opened=False)), "Blue")) == N_VOCAB


def test_a_form_begins_after_the_thought() -> None:
    form = outline(thought=thought(), whole=lambda: matcher('{"const": 7}'))
    assert "END" not in follow(form, "Let me see")
    assert follow(form, "Hm</think>") == ["\n"]
    assert follow(form, "Hm</think>\n\n") == ["7"]
    assert follow(form, "Hm</think>\n\n7") == ["END"]
    # A token that runs on behind the mark may only bring what fits there.
    after = follow(form, "Hm</thin")
    assert "k>\n\n" in after
    assert ">{" not in follow(form, "Hm</think")
    assert ">\n" in follow(form, "Hm</think")


def test_a_thought_may_be_left_out_before_a_form() -> None:
    form = outline(thought=thought(opened=False), whole=lambda: matcher('{"const": 7}'))
    assert sorted(follow(form, "")) == ["7", "<"]
    assert follow(form, "<t") == ["h"]
    assert follow(form, "7") == ["END"]
    assert len(follow(form, "<think>")) == N_VOCAB - 1


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_free_text_is_free_until_a_call(syntax: CallSyntax) -> None:
    form = outline(calls=calls(syntax))
    assert len(follow(form, "Blue, I think")) == N_VOCAB
    assert len(follow(form, f"Blue {syntax.trigger[:-1]}{syntax.trigger[:-1]}")) >= N_VOCAB - 3
    assert len(follow(form, syntax.trigger)) < 20


def test_tokens_that_run_on_behind_a_trigger_must_fit() -> None:
    after = follow(outline(calls=calls(HERMES)), "So <tool_cal")
    assert "l>\n" in after
    assert "l>{" not in after


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("required", [True, False])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_permitted_is_a_valid_call(syntax: CallSyntax, required: bool, seed: int) -> None:
    form = outline(calls=calls(syntax, required=required))
    text = spelled(walk(form, seed, bias=b"" if required else syntax.trigger.encode()))
    parts = AnswerParts(None, syntax=syntax)
    parts.push(text)
    parts.flush()
    assert parts.calls
    for call in parts.calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("weather", "time")
        assert arguments == {} if call.name == "time" else arguments["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_single_call_is_followed_by_nothing(syntax: CallSyntax) -> None:
    form = outline(calls=calls(syntax, required=True, several=False))
    for seed in range(5):
        parts = AnswerParts(None, syntax=syntax)
        said = parts.push(spelled(walk(form, seed))) + parts.flush()
        assert len(parts.calls) == 1
        assert not any(part.text for part in said)


@settings(deadline=None)
@given(st.sampled_from(SYNTAXES), st.integers(0, 1 << 20), st.data())
def test_taking_tokens_back_changes_nothing(syntax: CallSyntax, seed: int, data: st.DataObject) -> None:
    def new() -> Outline:
        return outline(thought=thought(4), calls=calls(syntax, required=True))

    text = walk(new(), seed)
    form = new()
    for _ in range(4):
        size = data.draw(st.integers(0, len(text)))
        assert form.try_consume_tokens(text[:size]) == size
        fresh = new()
        fresh.try_consume_tokens(text[:size])
        assert form.compute_logit_bias() == fresh.compute_logit_bias()
        assert form.is_accepting() == fresh.is_accepting()
        back = data.draw(st.integers(0, size))
        assert form.rollback(back)
        kept = text[: size - back]
        fresh = new()
        fresh.try_consume_tokens(kept)
        assert form.compute_logit_bias() == fresh.compute_logit_bias()
        assert form.rollback(len(kept))


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
        steps = syntax.steps([tool("f", "a"), TIME], several=False)
        form = outline(calls=Calls(syntax.trigger.encode(), steps, fed=syntax.trigger_is_json, required=True))
        texts = {spelled(walk(form, seed)) for seed in range(6)}
        assert any('"a"' in text for text in texts)
    with pytest.raises(UsageError, match="define 'thing' differently"):
        HERMES.steps([tool("f", "a"), tool("g", "b")], several=False)
