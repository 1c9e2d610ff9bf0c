"""Tools with schemas that can be enforced on what a model writes."""

from __future__ import annotations

import json
from dataclasses import replace

from edgespec.base.latest import LatestValues
from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.generation.tools import Tool
from edgespec.text.grammar.matchers import check_grammar
from edgespec.text.grammar.schemas import EndlessReference, normalized

_ANY_ARGUMENTS = '{"type": "object", "additionalProperties": true}'
_MAX_BYTES = 2 << 20

_arguments: LatestValues[tuple[str, str]] = LatestValues(_MAX_BYTES)


def closed(tool: Tool) -> Tool:
    """The tool with an enforceable schema that permits only the listed arguments, unless it says so.

    Raises:
        EndlessReference: a reference leads back to itself.
        UsageError: the grammar library is missing.
        InconclusiveTrial: as `check_grammar`.
    """
    return replace(tool, parameters=_enforceable(tool.parameters)[0])


def not_enforced(tool: Tool) -> str:
    """A sentence if calls of a tool need not fit its schema; empty if they do. Raises as `closed`."""
    return _enforceable(tool.parameters)[1].format(tool.name)


def unconstrained(tool: Tool) -> Tool:
    """The tool with any JSON object as its arguments."""
    return replace(tool, parameters=_ANY_ARGUMENTS)


def _enforceable(parameters: str) -> tuple[str, str]:
    """A schema that can be enforced, and a sentence about a tool ("{}") of which it leaves something out."""
    found = _arguments.get(parameters)
    if found is None:
        try:
            schema = json.dumps(normalized(json.loads(parameters)))
            whole = check_grammar(Grammar("json_schema", schema))
            found = schema, "" if whole else "Parts of the schema of the tool {} are not enforced."
        except EndlessReference:
            raise
        except GrammarError as error:
            reason = str(error).replace("{", "{{").replace("}", "}}")
            found = _ANY_ARGUMENTS, f"The schema of the tool {{}} is not enforced. {reason}"
        _arguments.put(parameters, found, len(parameters) + len(found[0]))
    return found
