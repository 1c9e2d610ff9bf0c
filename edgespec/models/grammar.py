"""Grammars over a model's tokens: JSON schemas, GBNF, Lark and regular expressions, by llguidance."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.generation import Grammar
from edgespec.models.vocabulary import Vocabulary

# Models that have nothing to say fill JSON with spaces and lines for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n]{0,20}"}
_CACHED = 16


class Grammars:
    """Compiles grammars for one vocabulary; what both have in common takes a second, once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: dict[Grammar, Any] = {}

    def matcher(self, grammar: Grammar) -> Any:
        """An llguidance.LLMatcher at the beginning of the grammar.

        Raises:
            UsageError: llguidance is not installed, or the grammar is wrong.
        """
        if grammar not in self._compiled:
            if len(self._compiled) >= _CACHED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = self._compile(grammar)
        return self._compiled[grammar].deep_copy()

    @cached_property
    def ends(self) -> NDArray[np.bool_]:
        """(n_vocab,) tokens that end an answer."""
        vocabulary = self._vocabulary
        return np.array([vocabulary.is_end(token) for token in range(vocabulary.n_tokens)], dtype=np.bool_)

    def _compile(self, grammar: Grammar) -> Any:
        llguidance = _import_llguidance()
        try:
            source = _source(grammar)
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        except ValueError as error:
            raise _wrong(grammar, str(error)) from error
        if matcher.is_error():
            raise _wrong(grammar, matcher.get_error())
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        llguidance = _import_llguidance()
        slices = llguidance.LLTokenizer.json_slices()
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(self._vocabulary)), slices=slices)


class _Tokens:
    """What llguidance asks of a tokenizer. Control tokens begin with a byte that no text has."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = vocabulary.bos if vocabulary.bos >= 0 else None
        self.special_token_ids: list[int] = []
        self.tokens = [self._bytes(token) for token in range(vocabulary.n_tokens)]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._vocabulary.tokenize(data, control=False)

    def _bytes(self, token: int) -> bytes:
        if self._vocabulary.is_control(token) or self._vocabulary.is_end(token):
            self.special_token_ids.append(token)
            return b"\xff" + self._vocabulary.text(token)
        return self._vocabulary.piece(token)


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))


def _wrong(grammar: Grammar, reason: str) -> UsageError:
    name = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}[grammar.kind]
    first = reason.strip().splitlines()[0].rstrip(".") if reason.strip() else "llguidance refused it"
    return UsageError(f"The {name} is wrong: {first}.", "Correct it.")


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise UsageError(
            "What reads grammars is not installed.", "Install it: pip install 'edgespec[grammar]'"
        ) from error
    return llguidance
