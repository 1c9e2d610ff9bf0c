"""Schemas that can be enforced on what a model writes: as much of a client's as grammars can be made of.

No schema of a tool costs a request: what cannot be enforced is left out, and named. In the end, a tool's
arguments are any JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgespec.errors import EdgeSpecError, GrammarError
from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool
from edgespec.latest import LatestValues
from edgespec.text.calls.loosened_arguments import loosened
from edgespec.text.calls.misfits import misfit
from edgespec.text.calls.references import with_local_references
from edgespec.text.grammar.closing import closed_schema
from edgespec.text.grammar.limits import is_plain, source_of

ANY_ARGUMENTS = '{"type": "object", "additionalProperties": true}'

_MAX_TRIALS = 300
_MAX_BYTES = 2 << 20  # of what is known of formats, and of arguments
_OF_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("anyOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
# What remains if a part cannot be enforced otherwise.
_STRUCTURE = frozenset((*_OF_SCHEMAS, *_LISTS, *_SCHEMAS, "type", "$ref", "enum", "const"))


def closed(tool: Tool) -> Tool:
    """The tool with an enforceable schema that permits only the listed arguments, unless it says so."""
    return replace(tool, parameters=_enforced_arguments(tool.parameters)[0])


def not_enforced(tool: Tool) -> tuple[str, ...]:
    """Clauses on the parts of a tool's schema that are not enforced: "'not' is not enforced"."""
    return _enforced_arguments(tool.parameters)[1]


def misfit_of(tool: Tool, arguments: str) -> str:
    """Why arguments (JSON) do not fit a schema that is not enforced as a whole; empty if they do."""
    if not not_enforced(tool):
        return ""
    try:
        return misfit(json.loads(arguments or "{}"), tool.schema)
    except (ValueError, TypeError, RecursionError):
        return ""  # it was cut off, which its client sees


def unconstrained(tool: Tool) -> Tool:
    """The tool with any JSON object as its arguments."""
    return replace(tool, parameters=ANY_ARGUMENTS)


_formats: LatestValues[tuple[Grammar, tuple[str, ...]]] = LatestValues(_MAX_BYTES)
_arguments: LatestValues[tuple[str, tuple[str, ...]]] = LatestValues(_MAX_BYTES)


def enforceable_format(grammar: Grammar) -> tuple[Grammar, tuple[str, ...]]:
    """The form of an answer, without what cannot be enforced of its schema; and what was left out.

    Raises:
        GrammarError: nothing of it can be enforced.
        InconclusiveTrial: as `check_grammar`.
    """
    found = _formats.get(grammar)
    if found is None:
        found = _enforced_format(grammar)
        _formats.put(grammar, found, len(grammar.text) + len(found[0].text))
    return found


def _enforced_format(grammar: Grammar) -> tuple[Grammar, tuple[str, ...]]:
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        return grammar, ()
    enforced, clauses = _enforced(schema)
    if enforced is None:
        _check(schema)  # raises what is wrong with it
        raise GrammarError("The JSON schema cannot be enforced.", "Simplify it.")
    return Grammar.of_schema(enforced), clauses


def _enforced_arguments(parameters: str) -> tuple[str, tuple[str, ...]]:
    found = _arguments.get(parameters)
    if found is None:
        found = _enforce_arguments(parameters)
        _arguments.put(parameters, found, len(parameters) + len(found[0]))
    return found


def _enforce_arguments(parameters: str) -> tuple[str, tuple[str, ...]]:
    try:
        enforced, clauses = _enforced(json.loads(parameters))
    except ModuleNotFoundError:  # without the grammar library, nothing is enforced
        return parameters, ()
    except (EdgeSpecError, RecursionError, TypeError, ValueError):
        enforced, clauses = None, ()
    if enforced is None:
        return ANY_ARGUMENTS, (*clauses, "it cannot be enforced at all")
    return json.dumps(enforced), clauses


def _enforced(schema: dict[str, Any]) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """As much of a schema as can be enforced, None for nothing; and what was left out."""
    left_out: set[str] = set()
    local = closed_schema(loosened(with_local_references(schema, left_out), left_out))
    clauses = [_clause(key) for key in sorted(left_out)]
    if not is_plain(Grammar.of_schema(local)):
        return (None if _refusal(local) else local), tuple(clauses)
    if _is_valid(local):
        return local, tuple(clauses)
    repair = _Repair(local)
    if not repair.succeeds():
        return None, tuple(clauses)
    return repair.schema, (*clauses, *repair.clauses)


def _clause(key: str) -> str:
    return "'oneOf' is enforced as 'anyOf'" if key == "oneOf" else f"{key!r} is not enforced"


def _refusal(schema: dict[str, Any]) -> str | None:
    """The reason why a schema cannot be enforced; None if it can."""
    try:
        _check(schema)
    except GrammarError as error:
        return str(error)
    return None


def _is_valid(schema: dict[str, Any]) -> bool:
    """True if llguidance can enforce a small schema."""
    from llguidance import LLMatcher

    try:
        wrong, _ = LLMatcher.validate_grammar_with_warnings(source_of(Grammar.of_schema(schema)))
    except GrammarError:
        return False
    return not wrong


def _check(schema: dict[str, Any]) -> None:
    from edgespec.text.grammar.matchers import check_grammar

    check_grammar(Grammar.of_schema(schema))


class _Repair:
    """Takes out of a schema what is wrong in its parts, from the innermost ones outwards.

    Attributes:
        schema: the schema as far as it was repaired.
        clauses: what was left out.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema: dict[str, Any] = json.loads(json.dumps(schema))
        self.clauses: list[str] = []
        self._trials = 0

    def succeeds(self) -> bool:
        """Repair the schema; False if that fails."""
        for part, path, remove in [*_parts(self.schema, ()), (self.schema, (), None)]:
            if self._holds(path):
                continue
            if not self._without_one(part, path) and not self._without_bounds(part, path):
                if remove is None:
                    return False
                remove()
                self.clauses.append(f"{_shown(path)} is not enforced")
            if self._trials > _MAX_TRIALS:
                return False
        return _is_valid(self.schema)

    def _without_one(self, part: dict[str, Any], path: tuple[str, ...]) -> bool:
        for key in [key for key in part if key not in _STRUCTURE]:
            value = part.pop(key)
            if self._holds(path):
                self.clauses.append(f"{key!r} of {_shown(path)} is not enforced")
                return True
            part[key] = value
        return False

    def _without_bounds(self, part: dict[str, Any], path: tuple[str, ...]) -> bool:
        removed = [key for key in part if key not in _STRUCTURE]
        for key in removed:
            del part[key]
        if removed and self._holds(path):
            self.clauses += [f"{key!r} of {_shown(path)} is not enforced" for key in removed]
            return True
        return False

    def _holds(self, path: tuple[str, ...]) -> bool:
        """True if the part at a path can be enforced by itself."""
        self._trials += 1
        pointer = "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in ("whole", *path))
        whole = {"$defs": {"whole": _moved(self.schema)}, "$ref": f"#/$defs{pointer}"}
        return _is_valid(whole)


def _parts(
    schema: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...], Callable[[], None] | None]]:
    """The parts of a schema, innermost first: each with its path and what replaces it by any value."""
    places: list[tuple[Any, Any, tuple[str, ...]]] = []
    for key in _OF_SCHEMAS:
        if isinstance(schema.get(key), dict):
            places += [(schema[key], name, (*path, key, name)) for name in schema[key]]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            places += [(schema[key], n, (*path, key, str(n))) for n in range(len(schema[key]))]
    places += [(schema, key, (*path, key)) for key in _SCHEMAS if key in schema]
    for holder, name, place in places:
        part = holder[name]
        if isinstance(part, dict):
            yield from _parts(part, place)
            yield part, place, part.clear
        elif not isinstance(part, bool | list):
            holder[name] = {}


def _moved(value: Any) -> Any:
    """A schema whose references lead into it where it is a definition of another one."""
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: f"#/$defs/whole{item[1:]}" if key == "$ref" and isinstance(item, str) else _moved(item)
        for key, item in value.items()
    }


def _shown(path: tuple[str, ...]) -> str:
    names = [key for key in path if key not in (*_OF_SCHEMAS, *_LISTS, *_SCHEMAS)]
    return f"{'.'.join(names)!r}" if names else "the schema"
