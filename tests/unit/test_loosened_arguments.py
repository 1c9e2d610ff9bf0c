"""Tools with schemas that were made for validating can be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool
from edgespec.models.text.calls.imposable import closed
from edgespec.models.text.grammar.limits import source_of


def refusal(schema: Any) -> str:
    """Objections of llguidance to a schema; empty if it can be imposed."""
    from llguidance import LLMatcher

    try:
        source = source_of(Grammar.of_schema(schema))
    except GrammarError as error:
        return str(error)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(source)
    return "; ".join(messages) if wrong else ""


def of(parameters: Any) -> Any:
    """The schema that calls of a tool must have."""
    return closed(Tool("f", parameters=json.dumps(parameters))).schema


@pytest.mark.parametrize(
    "argument",
    [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"type": "string", "not": {"const": "x"}},
        {"type": "object", "if": {"required": ["b"]}, "then": {"required": ["c"]}, "else": {}},
        {"type": "array", "items": {"type": "string", "format": "regex"}, "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}, "minContains": 1, "maxContains": 2},
        {"type": "string", "pattern": "^(?!/).*$"},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"type": "string", "format": "int32"},
        {"type": "object", "patternProperties": {"^(?!_)": {}}, "additionalProperties": False},
        {"anyOf": [{"type": "string", "format": "binary"}, {"type": "object", "dependentRequired": {}}]},
        {"type": "object", "unevaluatedProperties": False, "dependencies": {}},
    ],
)
def test_what_cannot_be_imposed_is_left_out(argument: Any) -> None:
    parameters = {"type": "object", "properties": {"a": argument}, "required": ["a"]}
    assert refusal(parameters), "a form of the answer itself is refused"
    assert not refusal(of(parameters))


def test_what_can_be_imposed_stays() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "not": {"type": "string", "format": "uri", "pattern": "^h"},
            "format": {"enum": ["not", "if"], "default": "not"},
            "n": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        },
        "required": ["not"],
        "additionalProperties": False,
    }
    assert of(schema) == schema
