"""Numbers have an end, and texts have as many digits as they like."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool
from edgespec.text.calls.enforceable import closed
from edgespec.text.calls.syntax import GEMMA, LFM2, CallSyntax
from edgespec.text.grammar.digits import MAX_DIGITS, BoundedDigits, DigitTokens
from edgespec.text.grammar.limits import source_of
from edgespec.text.structured_output.steps import GrammarStep
from tests.tiers import examples
from tests.unit.syntaxes import HERMES, LLAMA, MISTRAL, QWEN_CODER

END = 256
TOKENS = (*(bytes([byte]) for byte in range(256)), b"\xff<end>", b"12", b"123", b'7"', b"9,", b'":')
LONG = "1" * (MAX_DIGITS + 4)


class Words:
    """Tokens are bytes, the end, and some with several digits."""

    n_tokens = len(TOKENS)
    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = TOKENS

    def piece(self, token: int, *, control: bool = False) -> bytes:
        return b"" if token == END else TOKENS[token]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


WORDS = Words()
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(WORDS))
DIGITS = DigitTokens(WORDS)


def bounded(grammar: Grammar, quotes: str = '"') -> BoundedDigits:
    matcher = llguidance.LLMatcher(TOKENIZER, source_of(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return BoundedDigits(matcher, DIGITS, quotes.encode())


def accepts(matcher: BoundedDigits, text: str) -> bool:
    fresh, tokens = matcher.deep_copy(), list(text.encode())
    return fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()


def permitted(matcher: BoundedDigits) -> set[bytes]:
    return {TOKENS[n] for n in np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))}


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": "number"}, {"type": "integer", "minimum": 0}, {}]
)
@pytest.mark.parametrize("text", ["{}", "1.{}", "1e{}", "1.5e-{}"])
def test_a_number_has_so_many_digits_in_a_row(schema: dict[str, Any], text: str) -> None:
    if text != "{}" and schema.get("type") == "integer":
        pytest.skip("a whole number")
    matcher = bounded(Grammar.of_schema({"type": "array", "items": schema}))
    assert accepts(matcher, f"[{text.format('1' * MAX_DIGITS)}]")
    assert not accepts(matcher, f"[{text.format('1' * (MAX_DIGITS + 1))}]")


def test_digits_of_texts_and_names_do_not_count() -> None:
    matcher = bounded(Grammar.of_schema({"type": "object", "additionalProperties": True}))
    assert accepts(matcher, f'{{"{LONG}": "\\"{LONG}", "a\\\\": [{LONG[:MAX_DIGITS]}]}}')
    assert not accepts(matcher, f'{{"a\\\\": [{LONG}]}}')


def test_a_listed_number_may_be_longer() -> None:
    matcher = bounded(Grammar.of_schema({"type": "array", "items": {"const": 10**19}}))
    assert accepts(matcher, f"[{10**19}]")


def test_tokens_with_too_many_digits_are_not_permitted() -> None:
    matcher = bounded(Grammar.of_schema({"type": "array", "items": {"type": "integer"}}))
    assert matcher.try_consume_tokens(list(b"[" + b"1" * (MAX_DIGITS - 2))) == MAX_DIGITS - 1
    assert {b"12", b"1", b"9,", b","} <= permitted(matcher)
    assert b"123" not in permitted(matcher)
    assert matcher.try_consume_tokens([TOKENS.index(b"123")]) == 0
    assert matcher.try_consume_tokens([TOKENS.index(b"12")]) == 1
    assert permitted(matcher) == {b",", b"]", b" ", b"\n"}
    assert matcher.rollback(1)
    assert b"12" in permitted(matcher)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 1 << 30), max_size=60), st.data())
def test_taking_tokens_back_changes_nothing(choices: list[int], data: st.DataObject) -> None:
    matcher = bounded(Grammar.of_schema({"type": "array", "items": {}}))
    for choice in choices:
        options = [TOKENS.index(piece) for piece in sorted(permitted(matcher)) if piece[:1] != b"\xff"]
        if not options:
            break
        numeric = [token for token in options if TOKENS[token][:1].isdigit()] or options
        token = (
            numeric[choice % len(numeric)]
            if choice % 3
            else options[choice % len(options)]
            if options
            else END
        )
        before = matcher.compute_logit_bias()
        if not matcher.try_consume_tokens([token]):
            break
        if data.draw(st.booleans()):
            assert matcher.rollback(1)
            assert matcher.compute_logit_bias() == before
            assert matcher.try_consume_tokens([token]) == 1


@pytest.mark.parametrize("syntax", [HERMES, LLAMA, MISTRAL, QWEN_CODER, GEMMA, LFM2])
def test_numbers_in_calls_have_an_end(syntax: CallSyntax) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    (step,) = syntax.steps([closed(Tool("f", parameters=json.dumps(schema)))], several=False)
    assert isinstance(step, GrammarStep)
    assert syntax.spelling is not None
    matcher = (
        bounded(Grammar(step.kind, step.text), step.quotes)
        if step.quotes
        else bounded(Grammar(step.kind, step.text), "\0")
    )
    call = syntax.spelling.written([("f", {"a": 1.25})])
    text = call if syntax.trigger_is_json else call.removeprefix(syntax.trigger)
    assert "1.25" in text
    fits = text.replace("1.25", f"1.{LONG[:MAX_DIGITS]}")
    assert accepts(matcher, fits)
    assert not accepts(matcher, text.replace("1.25", f"1.{LONG}"))
