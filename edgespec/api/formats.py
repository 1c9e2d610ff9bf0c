"""The form that a request wants for its answer: a grammar, a JSON schema, or any JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from edgespec.api.limits import Limits
from edgespec.api.settings import Schema, Settings, StructuredOutputs
from edgespec.api.warnings import shown
from edgespec.errors import UsageError
from edgespec.generation.config import Grammar

_NAMES = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")  # characters with a meaning in regular expressions
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


class SchemaFormat(Struct):
    """A JSON schema with a name."""

    schema: Schema | None = None


class ResponseFormat(SchemaFormat, kw_only=True):
    """The form of an answer; some clients put the schema at this level."""

    type: str
    json_schema: SchemaFormat | None = None
    grammar: str | None = None


def read_format(asked: Settings, form: ResponseFormat | None, limits: Limits) -> Grammar | None:
    """The grammar that is requested: by a format, or in the way of llama.cpp's server, vLLM or SGLang."""
    wanted = asked.structured_outputs or StructuredOutputs()
    pattern = asked.guided_whitespace_pattern or wanted.whitespace_pattern
    if pattern is not None or wanted.structural_tag is not None:
        raise UsageError("Structural tags and patterns of white space cannot be enforced.", "Leave them out.")
    grammars = (asked.grammar, asked.ebnf, asked.guided_grammar, wanted.grammar)
    found = [Grammar("grammar", text) for text in grammars if text]  # programs send an empty one for none
    patterns = [text for text in (asked.regex, asked.guided_regex, wanted.regex) if text is not None]
    choices = [texts for texts in (asked.guided_choice, wanted.choice) if texts is not None]
    if not all(patterns) or not all(choices):
        raise UsageError("A regular expression or a list of choices is empty.", "Leave it out.")
    found += [Grammar("regex", text) for text in patterns] + [_choice(texts) for texts in choices]
    schemas = [asked.json_schema, asked.guided_json, wanted.json, _ANY_OBJECT if wanted.json_object else None]
    found += [_schema(schema) for schema in schemas if schema is not None]
    if form is not None and form.type != "text":
        found.append(_grammar(form))
    if len(found) > 1:
        raise UsageError("Several answer formats were requested.", "Request one of them.")
    return _within(found[0], limits) if found else None


def _choice(texts: Iterable[str]) -> Grammar:
    """The form of an answer that is one of these texts."""
    return Grammar("regex", "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts))


def _schema(schema: Schema | str) -> Grammar:
    """The form of a JSON schema, which some programs send as text."""
    return Grammar("json_schema", schema) if isinstance(schema, str) else Grammar.of_schema(schema)


def _grammar(form: ResponseFormat) -> Grammar:
    if form.type == "grammar":
        if form.grammar is None:
            raise UsageError('Missing "response_format.grammar".')
        return Grammar("grammar", form.grammar)
    if form.type not in ("json_object", "json_schema"):
        raise UsageError(
            f"Formats of the type {shown(form.type)} cannot be enforced.",
            "The types are text, json_object, json_schema and grammar.",
        )
    # Some servers take a schema with json_object; some clients put one at the upper level.
    inner = form.json_schema or form
    schema = form.schema if inner.schema is None else inner.schema
    if schema is None and form.type == "json_schema" and form.json_schema is None:
        raise UsageError('Missing "response_format.json_schema".')
    return Grammar.of_schema(_ANY_OBJECT if schema is None else schema)


def _within(grammar: Grammar, limits: Limits) -> Grammar:
    """The grammar, unless it is too long."""
    if len(grammar.text) > limits.grammar:
        raise UsageError(
            f"The {_NAMES[grammar.kind]} has {len(grammar.text):,} characters.",
            f"At most {limits.grammar:,} are allowed.",
        )
    return grammar
