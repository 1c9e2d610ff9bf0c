"""The form that a request wants for its answer: a grammar, a JSON schema, or any JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.api.limits import Limits
from edgespec.api.values import shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.config import Grammar

_NAMES = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def read_format(body: Mapping[str, Any], limits: Limits, warnings: Warnings) -> Grammar | None:
    """The grammar that is requested: by `response_format`, or in the way of llama.cpp's server.

    Parts of a schema that cannot be enforced are left out, with a warning.

    Raises:
        UsageError: it has another form, or there are several.
        GrammarError: a schema has no meaning.
    """
    forms = []
    grammar, schema, form = (body.get(name) for name in ("grammar", "json_schema", "response_format"))
    if grammar not in (None, ""):
        if not isinstance(grammar, str):
            raise wrong("grammar", grammar, "a string")
        forms.append(Grammar("grammar", grammar))
    if schema is not None:
        forms.append(_schema("json_schema", schema, limits, warnings))
    found = None if form is None else _response_format(form, limits, warnings)
    forms += [] if found is None else [found]
    if len(forms) > 1:
        raise UsageError("Several answer formats were requested.", "Request one of them.")
    return _within(forms[0], limits) if forms else None


def _response_format(form: object, limits: Limits, warnings: Warnings) -> Grammar | None:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not isinstance(form, Mapping):
        raise wrong("response_format", form, "an object whose type is text, json_object or json_schema")
    if kind not in ("text", "json_object", "json_schema", "grammar"):
        warnings.ignored("response_format", f"Formats of the type {shown(kind)} cannot be enforced.")
        return None
    if kind == "text":
        return None
    if kind == "grammar":
        if not isinstance(form.get("grammar"), str):
            raise wrong("response_format.grammar", form.get("grammar"), "a string")
        return Grammar("grammar", form["grammar"])
    # Some servers take a schema with json_object; some clients put one at the upper level.
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    schema = form.get("schema") if schema is None else schema
    if schema is None:
        if kind == "json_schema" and not isinstance(inner, Mapping):
            raise wrong("response_format.json_schema", inner, "an object with a schema")
        schema = _ANY_OBJECT
    return _schema("response_format", schema, limits, warnings)


def _schema(name: str, value: object, limits: Limits, warnings: Warnings) -> Grammar:
    """The grammar of a JSON schema."""
    if not isinstance(value, Mapping | bool):
        raise wrong(name, value, "a JSON schema")
    grammar = _within(Grammar.of_schema(value), limits)
    from edgespec.text.grammar.matchers import check_grammar

    if not check_grammar(grammar):
        warnings.add(f"Parts of the schema in {name} are not enforced.")
    return grammar


def _within(grammar: Grammar, limits: Limits) -> Grammar:
    """The grammar, unless it is too long."""
    if len(grammar.text) > limits.grammar:
        raise UsageError(
            f"The {_NAMES[grammar.kind]} has {len(grammar.text):,} characters.",
            f"At most {limits.grammar:,} are allowed.",
        )
    return grammar
