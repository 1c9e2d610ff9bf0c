"""Limits on grammars and schemas, and their translation into what llguidance compiles.

A server gets both from untrusted clients, and llguidance follows references and nesting by recursion: a chain
of 3,000 crashes the process. So size and depth are checked first, without recursion. What is small and simple
is then compiled at once; anything else is tried in a child process first (trial.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.text.grammar.schemas import MAX_DEPTH, normalized

MAX_BYTES = 256 << 10

# Beyond any of these, a grammar is tried in a child process first. The largest one within them takes less
# than a tenth of a thread's stack, and milliseconds.
_PLAIN_BYTES = {"json_schema": 16 << 10, "grammar": 4 << 10, "regex": 1 << 10}
_PLAIN_REFERENCES = 100
_PLAIN_COUNT = 1000  # of repetitions; of the automaton's states for a multipleOf

_TOKEN_BYTES = 460  # of llguidance's index

_TYPES = "string, number, integer, boolean, object, array and null"
NAMES = {"json_schema": "JSON schema", "grammar": "grammar", "regex": "regular expression"}

# At most one space or one line break with its indentation, as llama.cpp has it: without a limit, a model may
# fill JSON with whitespace forever. What is not implemented is ignored, with a warning.
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n[ \t]{0,20}", "lenient": True}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_NESTED = re.compile(r"\\.|[(\[{]|[)\]}]", re.DOTALL)
_COUNTED = re.compile(r"[{~,.]\s*(\d+)")  # a{9}, a{2,9}, a~2..9


def index_bytes(n_vocab: int) -> int:
    """Memory of the index of a vocabulary that grammars are compiled with."""
    return n_vocab * _TOKEN_BYTES


def check(grammar: Grammar) -> None:
    """Refuse what is too large or too deeply nested to be compiled.

    Raises:
        GrammarError: it is too large or too deep.
    """
    name = NAMES[grammar.kind]
    size = len(grammar.text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise GrammarError(
            f"The {name} has {size:,} bytes; at most {MAX_BYTES:,} can be used.",
            "Shorten it, or split the task.",
        )
    if grammar.kind == "json_schema" and (depth := _json_depth(grammar.text)) > MAX_DEPTH:
        raise GrammarError(
            f"The {name} is nested {depth} levels deep; the limit is {MAX_DEPTH}.",
            'Flatten it with "$defs" and "$ref".',
        )


def is_plain(grammar: Grammar) -> bool:
    """True if a grammar that passed `check` is small and simple enough to be compiled without a trial."""
    text = grammar.text
    if len(text) > _PLAIN_BYTES[grammar.kind]:
        return False
    if grammar.kind == "json_schema":
        return _is_plain_schema(text)
    if "%json" in text:
        text, schemas = _without_schemas(text)
        if "%json" in text or not all(map(_is_plain_schema, schemas)):
            return False
    if _depth(_NESTED, text) > _PLAIN_REFERENCES or not _counts_are_small([text]):
        return False
    return grammar.kind == "regex" or text.count("\n") <= _PLAIN_REFERENCES


def source_of(grammar: Grammar) -> str:
    """A grammar in the form that llguidance takes.

    Raises:
        GrammarError: it cannot be read.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if grammar.kind == "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object")
            schema = normalized(schema) if isinstance(schema, dict) else schema
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))
    except GrammarError:
        raise
    except Exception as error:  # any_to_lark raises no other kind
        raise wrong(grammar, str(error)) from error


def wrong(grammar: Grammar, reason: str) -> GrammarError:
    """The error for a grammar that llguidance refused, quoting its reason."""
    name = NAMES[grammar.kind]
    lines = reason.strip().splitlines() or ["llguidance rejected it"]
    first = lines[0].rstrip(".")
    if first.endswith(":"):  # a regular expression, a marked place in it, and the reason
        first = f"{first} {lines[-1].removeprefix('error: ')}"
    if len(first) > 300:
        first = first[:297] + "..."
    kind = grammar.kind == "json_schema" and re.match(r"Invalid type: (\S+)", first)
    hint = f'Replace "type": "{kind[1]}" by one of {_TYPES}.' if kind else "Correct it."
    return GrammarError(f"The {name} is invalid: {first}.", hint)


def _without_schemas(text: str) -> tuple[str, list[str]]:
    """A grammar without the schemas behind its "%json", and these; one that is no JSON stays there."""
    decoder, schemas, rest = json.JSONDecoder(), [], []
    at = 0
    for found in re.finditer(r"%json\s*(?=\{)", text):
        if found.start() < at:  # within a schema
            continue
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        if schema.get("x-guidance") == JSON_OPTIONS:
            del schema["x-guidance"]
        schemas.append(json.dumps(schema))
        rest.append(text[at : found.start()])
        at = end
    return "".join(rest) + text[at:], schemas


def _is_plain_schema(text: str) -> bool:
    try:
        nodes = list(_nodes(json.loads(text)))
    except (ValueError, RecursionError):
        return True  # the compiler will report it
    multiples = [node["multipleOf"] for node in nodes if "multipleOf" in node]
    patterns = [str(node["pattern"]) for node in nodes if "pattern" in node]
    patterns += [key for node in nodes for key in _keys(node.get("patternProperties"))]
    return (
        sum("$ref" in node for node in nodes) <= _PLAIN_REFERENCES
        # If several hold at once, the numbers of the automata's states are multiplied.
        and len(multiples) <= 1
        and all(type(value) is int and abs(value) <= _PLAIN_COUNT for value in multiples)
        and sum(map(len, patterns)) <= _PLAIN_BYTES["regex"]
        and _counts_are_small(patterns)
        and all(_is_plain_grammar(node) for node in nodes)
    )


def _is_plain_grammar(node: dict[str, Any]) -> bool:
    """llguidance's own keywords put whole grammars into a schema."""
    return not any(key.startswith("x-guidance") or key == "lark" for key in node)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """The objects in a JSON value, found without recursion."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            yield value
            open_values.extend(value.values())
        elif isinstance(value, list):
            open_values.extend(value)


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _counts_are_small(texts: list[str]) -> bool:
    """True if counted repetitions stay small, even if each of them repeats the others."""
    product = 1
    for text in texts:
        for count in _COUNTED.findall(text):
            if len(count) > 6:
                return False
            product *= max(int(count), 1)
    return product <= _PLAIN_COUNT


def _json_depth(text: str) -> int:
    return _depth(_BRACKETS, text)


def _depth(brackets: re.Pattern[str], text: str) -> int:
    depth = most = 0
    for match in brackets.finditer(text):
        found = match[0]
        if found in "([{":
            depth += 1
            most = max(most, depth)
        elif found in ")]}":
            depth -= 1
    return most
