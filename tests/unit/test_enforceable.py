"""Schemas of strangers: what is enforced of them, and that the work on them has an end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.errors import GrammarError, UsageError
from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool, ToolCall
from edgespec.text.calls.argument_values import SchemaReader
from edgespec.text.calls.enforceable import closed, not_enforced, unconstrained
from edgespec.text.calls.syntax import GEMMA, LFM2, CallSyntax
from edgespec.text.grammar.limits import source_of
from edgespec.text.grammar.matchers import check_grammar
from edgespec.text.grammar.schemas import EndlessReference, Steps, normalized
from edgespec.text.grammar.trial import _Bytes
from tests.unit.syntaxes import HERMES, LEARNED, QWEN_CODER, learned


def tool_of(parameters: Any) -> Tool:
    return Tool("f", parameters=json.dumps(parameters))


def of(parameters: Any) -> Any:
    """The schema that calls of a tool must have."""
    return closed(tool_of(parameters)).schema


def grammar_of(schema: Any) -> Any:
    """A matcher of a schema over single bytes."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    matcher = llguidance.LLMatcher(tokenizer, source_of(Grammar.of_schema(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: Any, text: str) -> bool:
    """True if a matcher accepts a text as a whole."""
    fresh, tokens = matcher.deep_copy(), list(text.encode())
    return fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()


@pytest.mark.parametrize(
    "argument",
    [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"type": "string", "not": {"const": "x"}},
        {"type": "object", "if": {"required": ["b"]}, "then": {"required": ["c"]}, "else": {}},
        {"type": "array", "items": {"type": "string", "format": "regex"}, "uniqueItems": True},
        {"type": "string", "pattern": "^(?!/).*$"},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"type": "object", "patternProperties": {"^(?!_)": {}}, "additionalProperties": False},
        {"anyOf": [{"type": "string", "format": "binary"}, {"type": "object", "dependentRequired": {}}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "string", "pattern": r"\bword\b"},
    ],
)
def test_keywords_that_are_not_implemented_are_ignored_with_one_sentence(argument: Any) -> None:
    parameters = {"type": "object", "properties": {"a": argument, "b": {"const": 1}}, "required": ["a"]}
    assert not check_grammar(Grammar.of_schema(parameters))
    assert of(parameters)["properties"]["b"] == {"const": 1}, "the other arguments keep their form"
    assert not_enforced(tool_of(parameters)) == "Parts of the schema of the tool f are not enforced."
    assert grammar_of(parameters)


@pytest.mark.parametrize(
    "argument",
    [
        {"type": "string", "pattern": "["},
        {"type": "array", "items": {"type": "nonsense"}},
        {"enum": []},
        {"$ref": "https://example.com/elsewhere.json"},
        {"$ref": "#/$defs/missing"},
    ],
)
def test_a_schema_without_meaning_leaves_its_tool_without_constraints_and_is_no_form(argument: Any) -> None:
    parameters = {"type": "object", "properties": {"a": argument}, "required": ["a"]}
    assert closed(tool_of(parameters)) == unconstrained(tool_of(parameters))
    assert not_enforced(tool_of(parameters)).startswith("The schema of the tool f is not enforced. ")
    with pytest.raises(GrammarError):
        check_grammar(Grammar.of_schema(parameters))


def test_the_range_of_a_machines_integers_is_no_constraint() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert check_grammar(Grammar.of_schema(schema))
    assert accepts(grammar_of(schema), "-7")


def test_keywords_of_other_types_are_refused_by_name() -> None:
    for key, value in (("patternProperties", 3), ("properties", []), ("items", "x"), ("enum", None)):
        with pytest.raises(GrammarError):
            check_grammar(Grammar.of_schema({"type": "object", "properties": {"a": {key: value}}}))


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


def test_references_whose_paths_join_to_one_name_stay_apart() -> None:
    schema = {
        "type": "object",
        "$defs": {"at_properties_a": {"type": "boolean"}, "d0": {"const": 7}},
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "integer"}}},
            "a_properties_b": {"type": "string"},
            "v": {"$ref": "#/$defs/d0"},
            "w": {"$ref": "#/$defs/at_properties_a"},
            "x": {"$ref": "#/properties/a/properties/b"},
            "y": {"$ref": "#/properties/a_properties_b"},
            "z": {"$ref": "#/properties/a"},
        },
        "required": ["v", "w", "x", "y", "z"],
    }
    matcher = grammar_of(of(schema))
    assert accepts(matcher, '{"v":7,"w":true,"x":1,"y":"","z":{"b":1}}')
    for wrong in (
        '"w":true,"x":"","y":"","z":{}',
        '"w":true,"x":1,"y":1,"z":{}',
        '"w":{},"x":1,"y":"","z":{}',
    ):
        assert not accepts(matcher, f'{{"v":7,{wrong}}}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$ref": "#"}, "'#'"),
        ({"anyOf": [{"$ref": "#"}] * 12, "not": {"required": ["zz"]}}, "'#'"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, "'#/$defs/b'"),
        ({"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}, "'#/properties/a'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "'#/"),
    ],
)
def test_a_reference_that_never_ends_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(EndlessReference, match="leads back to itself") as refused:
        closed(tool_of({"type": "object", **schema}))
    assert named in str(refused.value)
    with pytest.raises(GrammarError, match="leads back to itself"):
        check_grammar(Grammar.of_schema(schema))


def test_a_reference_to_what_is_around_it_may_end() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(grammar_of(tree), '{"next":{"next":{}}}')


def wide(levels: int, breadth: int) -> dict[str, Any]:
    """A small schema in which each of some levels has alternatives on the next: breadth**levels in all."""
    definitions: dict[str, Any] = {
        f"n{n}": {"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}] * breadth} for n in range(levels)
    }
    definitions[f"n{levels}"] = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n0"}}}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": definitions}


@pytest.mark.parametrize("syntax", [GEMMA, LFM2, QWEN_CODER, learned("MINIMAX_3", LEARNED["MINIMAX_3"])])
def test_alternatives_without_end_cost_no_more_than_the_budget(syntax: CallSyntax) -> None:
    with pytest.raises(UsageError, match="too many parts"):
        syntax.steps([closed(tool_of(wide(12, 12)))], several=False)


def test_what_is_nested_without_end_costs_no_more_than_the_budget() -> None:
    node = {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/n"} for n in range(60)}}
    deep = tool_of({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}})
    with pytest.raises(UsageError, match="too many parts"):
        learned("MINIMAX_3", LEARNED["MINIMAX_3"]).steps([closed(deep)], several=False)
    assert HERMES.steps([closed(deep)], several=False)


def test_definitions_that_hold_each_other_cost_no_more_than_the_budget() -> None:
    part: dict[str, Any] = {"enum": [1]}
    paths = ["#"]
    for n in range(90):
        part = {"properties": {"a": part, **{f"b{n}_{m}": {"const": m} for m in range(20)}}}
        paths.append(f"{paths[-1]}/properties/a")
    schema = {
        "type": "object",
        **part,
        "patternProperties": {f"x{n}": {"$ref": p} for n, p in enumerate(paths)},
    }
    with pytest.raises(GrammarError, match="too many parts"):
        normalized(schema)


def test_many_small_schemas_cost_no_more_than_a_large_one() -> None:
    small, large = Steps(100), Steps(10**9)
    with pytest.raises(GrammarError, match="too many parts"):
        small.take(3_000)
    large.take(3_000)


def test_the_values_of_a_schema_are_found_once() -> None:
    schemas = SchemaReader(closed(tool_of(wide(1, 3))))
    value = schemas.value(schemas.listed["a"])
    before = vars(schemas.steps).copy()
    assert schemas.value(schemas.listed["a"]) is value
    assert vars(schemas.steps) == before


def test_a_form_has_no_names_that_are_not_listed_unless_it_says_so() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not accepts(grammar_of(schema), '{"a":1,"b":2}')
    assert accepts(grammar_of(schema), '{"a":1}')
    assert accepts(grammar_of({**schema, "additionalProperties": True}), '{"a":1,"b":2}')


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
    assert not_enforced(tool_of(schema)) == ""


@pytest.mark.parametrize(
    ("space", "permitted"), [("", 1), (" ", 1), ("\n  ", 1), ("  ", 0), ("\n\n", 0), ("\t", 0)]
)
def test_one_space_or_line_break_stands_between_tokens_of_json(space: str, permitted: int) -> None:
    text = f'{{{space}"a":{space}[1,{space}2]{space}}}'
    assert accepts(grammar_of({"type": "object", "additionalProperties": True}), text) is bool(permitted)


def test_fractions_of_a_second_have_an_end() -> None:
    matcher = grammar_of({"type": "string", "format": "date-time"})
    assert accepts(matcher, '"2026-11-29T01:02:03.123456789+01:00"')
    assert not accepts(matcher, '"2026-11-29T01:02:03.1234567890+01:00"')


def test_arguments_that_are_too_deep_or_no_json_are_no_values() -> None:
    for number in ("NaN", "-Infinity", "1e999"):
        assert ToolCall("id", "f", f'{{"a": {number}}}').values == {}
    call = ToolCall("id", "f", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert not call.is_complete
    assert call.values == {}
