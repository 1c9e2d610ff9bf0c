"""Tools with schemas that were made for validating can be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool
from edgespec.text.calls.enforceable import (
    ANY_ARGUMENTS,
    closed,
    enforceable_format,
    not_enforced,
)
from edgespec.text.calls.misfits import misfit
from edgespec.text.grammar.limits import source_of
from edgespec.text.grammar.trial import _Bytes


def refusal(schema: Any) -> str:
    """Objections of llguidance to a schema; empty if it can be enforced."""
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
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "pattern": r"\bword\b"},
        {"type": "string", "pattern": "["},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "array", "items": {"type": "nonsense"}},
        {"enum": []},
        {"$ref": "https://example.com/elsewhere.json"},
        {"$ref": "#/$defs/missing"},
        {"properties": {"b": {}}, "required": ["c"], "additionalProperties": False, "minProperties": "x"},
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_named(argument: Any) -> None:
    parameters = {"type": "object", "properties": {"a": argument, "b": {"const": 1}}, "required": ["a"]}
    assert refusal(parameters)
    assert not refusal(of(parameters))
    assert of(parameters)["properties"]["b"] == {"const": 1}, "the other arguments keep their form"
    assert not_enforced(Tool("f", parameters=json.dumps(parameters)))
    enforced, left_out = enforceable_format(Grammar.of_schema(parameters))
    assert not refusal(json.loads(enforced.text))
    assert left_out


def test_a_schema_without_meaning_leaves_a_tool_without_constraints_and_is_no_form() -> None:
    parameters = {"type": "object", "allOf": [{"type": "array"}]}
    assert of(parameters) == json.loads(ANY_ARGUMENTS)
    assert not_enforced(Tool("f", parameters=json.dumps(parameters))) == ("it cannot be enforced at all",)
    with pytest.raises(GrammarError):
        enforceable_format(Grammar.of_schema({"type": "nonsense"}))


def test_references_lead_to_what_they_name() -> None:
    city = {"type": "object", "properties": {"name": {"const": "Oslo"}}, "additionalProperties": False}
    schema = {
        "$id": "https://example.com/ship.json",
        "type": "object",
        "properties": {
            "from": city,
            "to": {"$ref": "#/properties/from"},
            "via": {"$ref": "https://example.com/ship.json#/$defs/Port"},
        },
        "required": ["to", "via"],
        "$defs": {"Port": {"const": 7}},
    }
    matcher = grammar_of(of(schema))
    assert accepts(matcher, '{"to":{"name":"Oslo"},"via":7}')
    assert not accepts(matcher, '{"to":{"name":"Rome"},"via":7}')
    assert not accepts(matcher, '{"to":{"name":"Oslo"},"via":8}')


def test_a_form_has_no_names_that_are_not_listed_unless_it_says_so() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not accepts(grammar_of(schema), '{"a":1,"b":2}')
    assert accepts(grammar_of(schema), '{"a":1}')
    assert accepts(grammar_of({**schema, "additionalProperties": True}), '{"a":1,"b":2}')


def grammar_of(schema: Any) -> Any:
    """A matcher of a schema over single bytes."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    return llguidance.LLMatcher(tokenizer, source_of(Grammar.of_schema(schema)))


def accepts(matcher: Any, text: str) -> bool:
    """True if a matcher accepts a text as a whole."""
    fresh, tokens = matcher.deep_copy(), list(text.encode())
    return fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()


def test_what_can_be_enforced_stays() -> None:
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


@pytest.mark.parametrize(
    ("schema", "fitting", "other"),
    [
        ({"type": ["string", "null"]}, None, 1),
        ({"type": "number"}, 1, "1"),
        ({"type": "integer"}, 1, True),
        ({"enum": [1, "a"]}, "a", "b"),
        ({"const": {"a": 1}}, {"a": 1}, {}),
        ({"minimum": 1, "exclusiveMaximum": 3}, 2.5, 3),
        ({"minLength": 2}, "ab", "a"),
        ({"maxItems": 1}, [1], [1, 2]),
        ({"items": {"type": "string"}}, ["a"], ["a", 1]),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, 2, 3),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 0.5, 1),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, 1, 3),
        ({"not": {"const": 1}}, 2, 1),
        ({"required": ["a"]}, {"a": 1}, {"b": 1}),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": False}, {"a": ""}, {"b": ""}),
        ({"properties": {"a": {"properties": {"b": {"const": 1}}}}}, {"a": {"b": 1}}, {"a": {"b": 2}}),
        ({"$defs": {"A": {"const": 1}}, "$ref": "#/$defs/A"}, 1, 2),
        ({"$ref": "#/$defs/missing"}, 1, None),
        ({"pattern": "("}, "a", None),
    ],
)
def test_what_does_not_fit_a_schema_is_found(schema: Any, fitting: Any, other: Any) -> None:
    assert misfit(fitting, schema) == ""
    assert other is None or misfit(other, schema)
