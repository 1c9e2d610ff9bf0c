"""Tools in requests of the OpenAI API, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.api.arguments import arguments_of
from edgespec.api.limits import Limits
from edgespec.api.values import boolean, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.generation.tools import CHOICES, Tool

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, which takes a text instead of arguments."""

_REQUIRED = ("required", "any")


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request.

    Attributes:
        settings: those for GenerationConfig.
        custom: names of tools that take a text, for which their calls are translated back.
    """

    settings: Mapping[str, Any]
    custom: frozenset[str] = frozenset()


def read_tools(body: Mapping[str, Any], limits: Limits, warnings: Warnings, *, chat: bool) -> OfferedTools:
    """The tools in a body: those of `tools`, `tool_choice` and `parallel_tool_calls`, or of `functions`.

    What cannot be offered is left out, with a warning: agents send all tools that they know.

    Raises:
        UsageError: they have another form, or together are too long.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    several = boolean(body, "parallel_tool_calls", default=True)
    if body.get("functions") and not given:
        given = body["functions"]
        warnings.add("Calls of functions are answered as tool_calls.")
    if choice is None and body.get("function_call") is not None:
        choice = body["function_call"]
        choice = {"type": "function", **choice} if isinstance(choice, Mapping) else choice
    if given is not None and not isinstance(given, list):
        raise wrong("tools", given, "a list")
    if not chat:
        if given:
            warnings.ignored("tools", "Tools are for chats.")
        return OfferedTools({})
    tools: dict[str, Tool] = {}
    custom: set[str] = set()
    for definition in given or []:
        tool = _tool(definition, custom, warnings)
        if tool is None:
            continue
        if tool.name in tools:
            if tools[tool.name] != tool:
                warnings.add(f"Left out the second tool that is named {shown(tool.name)}.")
            continue
        tools[tool.name] = tool
    size = sum(len(tool.parameters) + len(tool.description) for tool in tools.values())
    if size > limits.tools:
        raise UsageError(f"The tools have {size:,} characters.", f"At most {limits.tools:,} are allowed.")
    chosen, tools = _chosen(choice, tools, warnings, were_given=bool(given))
    if not tools:
        return OfferedTools({})
    settings = {"tools": tuple(tools.values()), "tool_choice": chosen, "parallel_tool_calls": several}
    return OfferedTools(settings, frozenset(custom))


def custom_input(arguments: str) -> str:
    """The text in the call of a custom tool; what there is of it if the answer was cut off."""
    value = arguments_of(arguments, "", Warnings()).get(CUSTOM_INPUT, "")
    return value if isinstance(value, str) else json.dumps(value)


def _tool(definition: object, custom: set[str], warnings: Warnings) -> Tool | None:
    """The tool of a definition; None if only the API's own servers can run it."""
    kind = definition.get("type", "function") if isinstance(definition, Mapping) else None
    if not isinstance(definition, Mapping):
        raise UsageError(f"A tool must be an object, not {shown(definition)}.")
    if kind == "custom":
        inner = definition.get("custom", definition)
        about: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
        text = {"type": "string", "description": "The whole input, as text."}
        takes_text = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        as_function = {"name": about.get("name"), "description": _described(about), "parameters": takes_text}
        if isinstance(about.get("format"), Mapping) and about["format"].get("type") == "grammar":
            warnings.add(f"The grammar of the tool {shown(about.get('name'))} is shown to the model only.")
        tool = Tool.of({"type": "function", "function": as_function})
        custom.add(tool.name)
        return tool
    if kind not in (None, "function"):
        warnings.add(f"Left out a tool of the type {shown(kind)}, which cannot be run here.")
        return None
    given = definition.get("function", definition)
    if not isinstance(given, Mapping):
        raise UsageError("A tool has no function.", 'Write {"type": "function", "function": {...}}.')
    function: dict[str, Any] = dict(given)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(function.get("description"), str | None):
        warnings.ignored(f"the description of the tool {name}", "Use a string.")
        function["description"] = ""
    if schema is not None and not (isinstance(schema, Mapping) and _describes_object(schema)):
        warnings.ignored(f"the parameters of the tool {name}", "They must be the JSON schema of an object.")
        function["parameters"] = {"type": "object", "additionalProperties": True}
    elif isinstance(schema, Mapping) and schema.get("type", "object") != "object":
        function["parameters"] = {**schema, "type": "object"}
    return Tool.of({"type": "function", "function": function})


def _described(about: Mapping[str, Any]) -> str:
    """The description of a custom tool, with the grammar of its input."""
    form = about.get("format")
    text = about.get("description") if isinstance(about.get("description"), str) else ""
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else {}
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    if not isinstance(definition, str):
        return str(text)
    return f"{text}\n\nThe input has this grammar ({grammar.get('syntax')}):\n{definition}".strip()


def _describes_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type") or "object"
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _chosen(
    choice: object, tools: dict[str, Tool], warnings: Warnings, *, were_given: bool
) -> tuple[str, dict[str, Tool]]:
    """The choice among tools, and those that may be called.

    Args:
        were_given: the request had tools, of which some may have been left out.

    Raises:
        UsageError: it is none, or names what is no tool.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if choice is None or choice in CHOICES or (isinstance(choice, str) and choice in _REQUIRED):
        chosen = "required" if choice in _REQUIRED else str(choice or "auto")
        if chosen == "required" and not tools:
            if not were_given:
                raise UsageError("tool_choice requires a call, and there are no tools.", "Give tools.")
            warnings.ignored("tool_choice", "None of the tools can be called here.")
        return chosen, tools
    if isinstance(choice, Mapping) and kind == "allowed_tools":
        return _allowed(choice, tools, warnings)
    named: Any = choice
    if isinstance(choice, Mapping):
        inner = choice.get("function") or choice.get("custom")
        named = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        if named is None and kind not in (None, "function", "custom"):
            warnings.ignored("tool_choice", f"Tools of the type {shown(kind)} cannot be run here.")
            return "auto", tools
    if not isinstance(named, str) or not named:
        raise wrong("tool_choice", choice, f"{', '.join(CHOICES)}, or a function by its name")
    if named not in tools:
        raise UsageError(f"tool_choice names {shown(named)}, which is not one of the tools.")
    if named in CHOICES:  # which would be taken for the choice of that name
        return "required", {named: tools[named]}
    return named, tools


def _allowed(
    choice: Mapping[str, Any], tools: dict[str, Tool], warnings: Warnings
) -> tuple[str, dict[str, Tool]]:
    inner = choice.get("allowed_tools", choice)
    listed = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(listed, list):
        raise wrong("tool_choice", choice, "allowed_tools with a list of tools")
    names = set()
    for item in listed:
        about = item if isinstance(item, Mapping) else {}
        inside = about.get("function") or about.get("custom") or about
        names.add(inside.get("name") if isinstance(inside, Mapping) else None)
    allowed = {name: tool for name, tool in tools.items() if name in names}
    if not allowed:
        warnings.ignored("tool_choice", "None of the allowed tools is one of the tools.")
        return "none", tools
    return ("required" if inner.get("mode") == "required" else "auto"), allowed
