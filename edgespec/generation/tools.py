"""Tools that a model may call, and its calls: plain values in the form of the OpenAI API."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import UsageError

CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments, an object, as text.
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'

    @classmethod
    def of(cls, definition: object) -> Tool:
        """The tool that {"type": "function", "function": {...}} defines; the inner object alone will do too.

        Raises:
            UsageError: it has another form.
        """
        function = definition.get("function", definition) if isinstance(definition, Mapping) else None
        kind = definition.get("type", "function") if isinstance(definition, Mapping) else None
        if not isinstance(function, Mapping) or kind != "function":
            raise UsageError("A tool is not a function.", 'Write {"type": "function", "function": {...}}.')
        name, description = function.get("name"), function.get("description") or ""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                "A tool has no valid name.", "It must have 1 to 256 letters, digits, '_', '-' and '.'."
            )
        if not isinstance(description, str):
            raise UsageError(f"The description of the tool {name} is not a string.")
        schema = function.get("parameters")
        schema = {"type": "object", "properties": {}} if schema in (None, {}) else schema
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise UsageError(f"The parameters of the tool {name} are not the JSON schema of an object.")
        try:
            return cls(name, description, json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"The parameters of the tool {name} are not JSON: {error}.") from error

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates and the API know it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes.

    Attributes:
        arguments: JSON; incomplete only if the answer was cut off within it.
    """

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> Any:
        """The arguments, read from their JSON; an empty object if it was cut off, or is too deep."""
        try:
            return json_value(self.arguments or "{}")
        except (ValueError, RecursionError):
            return {}

    @property
    def is_complete(self) -> bool:
        """True if its arguments are JSON that can be read: not too deep, nor cut off with the answer."""
        try:
            json_value(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True

    def to_json(self) -> dict[str, Any]:
        """The call in the form of the API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call as it is generated.

    Attributes:
        index: of the call in its answer.
        id, name: in the first piece of a call only; empty in the others.
        arguments: the next part of its JSON.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def json_value(text: str) -> Any:
    """A JSON value that the model wrote.

    Raises:
        ValueError: it is not JSON, as NaN and Infinity are not, or a number is beyond the range of a float.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def tools_of(definitions: Sequence[object]) -> tuple[Tool, ...]:
    """The tools in a list of tools or definitions.

    Raises:
        UsageError: one has another form, or two have the same name.
    """
    tools = tuple(item if isinstance(item, Tool) else Tool.of(item) for item in definitions)
    names = set()
    for tool in tools:
        if tool.name in names:
            raise UsageError(f"Two tools are named {tool.name}.", "Give each a name of its own.")
        names.add(tool.name)
    return tools


def check_choice(choice: str, tools: Sequence[Tool]) -> None:
    """Refuse a choice that these tools do not allow.

    Args:
        choice: one of CHOICES, or the name of the tool that must be called.

    Raises:
        UsageError: it is neither, or requires a call without tools.
    """
    if choice in ("auto", "none"):
        return
    if not tools:
        raise UsageError(
            f"tool_choice is '{choice}', and there are no tools.", "Give tools, or leave out tool_choice."
        )
    if choice != "required" and choice not in [tool.name for tool in tools]:
        raise UsageError(f"tool_choice names '{choice}', which is not one of the tools.")
