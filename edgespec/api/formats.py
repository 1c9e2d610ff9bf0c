"""The form that a request wants for its answer: a grammar, a JSON schema, or any JSON object."""

from __future__ import annotations

from msgspec import Struct

from edgespec.api.limits import Limits
from edgespec.api.settings import Schema, Settings
from edgespec.api.warnings import Warnings, shown
from edgespec.errors import UsageError
from edgespec.generation.config import Grammar

_NAMES = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


class SchemaFormat(Struct):
    """A JSON schema with a name."""

    schema: Schema | None = None


class ResponseFormat(SchemaFormat, kw_only=True):
    """The form of an answer; some clients put the schema at this level."""

    type: str
    json_schema: SchemaFormat | None = None
    grammar: str | None = None


def read_format(
    asked: Settings, form: ResponseFormat | None, limits: Limits, warnings: Warnings
) -> Grammar | None:
    """The grammar that is requested: by a format, or in the way of llama.cpp's server.

    Raises:
        UsageError: there are several, or one is too long.
    """
    found = []
    if asked.grammar:
        found.append(Grammar("grammar", asked.grammar))
    if asked.json_schema is not None:
        found.append(Grammar.of_schema(asked.json_schema))
    if form is not None and form.type != "text":
        found += _grammars(form, warnings)
    if len(found) > 1:
        raise UsageError("Several answer formats were requested.", "Request one of them.")
    return _within(found[0], limits) if found else None


def _grammars(form: ResponseFormat, warnings: Warnings) -> list[Grammar]:
    """The grammar of a format; none if it cannot be enforced."""
    if form.type == "grammar":
        if form.grammar is None:
            raise UsageError('Missing "response_format.grammar".')
        return [Grammar("grammar", form.grammar)]
    if form.type not in ("json_object", "json_schema"):
        warnings.ignored("response_format", f"Formats of the type {shown(form.type)} cannot be enforced.")
        return []
    # Some servers take a schema with json_object; some clients put one at the upper level.
    inner = form.json_schema or form
    schema = form.schema if inner.schema is None else inner.schema
    if schema is None and form.type == "json_schema" and form.json_schema is None:
        raise UsageError('Missing "response_format.json_schema".')
    return [Grammar.of_schema(_ANY_OBJECT if schema is None else schema)]


def _within(grammar: Grammar, limits: Limits) -> Grammar:
    """The grammar, unless it is too long."""
    if len(grammar.text) > limits.grammar:
        raise UsageError(
            f"The {_NAMES[grammar.kind]} has {len(grammar.text):,} characters.",
            f"At most {limits.grammar:,} are allowed.",
        )
    return grammar
