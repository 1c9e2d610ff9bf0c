"""Tools in requests of the OpenAI API, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from edgespec.api.arguments import arguments_of
from edgespec.api.limits import Limits
from edgespec.api.settings import Settings
from edgespec.api.warnings import Warnings, shown, wrong
from edgespec.errors import UsageError
from edgespec.generation.tools import CHOICES, Tool

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, which takes a text instead of arguments."""

_TEXT = {"type": "string", "description": "The whole input, as text."}
_TAKES_TEXT = {"type": "object", "properties": {CUSTOM_INPUT: _TEXT}, "required": [CUSTOM_INPUT]}


class InputFormat(Struct):
    """The form of the input of a custom tool; its grammar is here, or in an object of its own."""

    type: str | None = None
    definition: str | None = None
    syntax: str | None = None
    grammar: InputFormat | None = None


class ToolFunction(Struct):
    """A function, or a custom tool, that the model may call."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: InputFormat | None = None


class ToolDefinition(ToolFunction):
    """A tool in any of the forms that it has in requests."""

    type: str | None = None
    function: ToolFunction | None = None
    custom: ToolFunction | None = None


class ToolReference(Struct):
    """A tool that is named, or those among which the model may choose."""

    type: str | None = None
    name: str | None = None
    function: ToolReference | None = None
    custom: ToolReference | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None
    allowed_tools: ToolReference | None = None

    @property
    def named(self) -> str | None:
        return (self.function or self.custom or self).name


class SettingsWithTools(Settings):
    """The settings of a request that may have tools."""

    tools: Sequence[ToolDefinition] = ()
    tool_choice: str | ToolReference | None = None
    parallel_tool_calls: bool = True
    functions: Sequence[ToolDefinition] = ()
    function_call: str | ToolReference | None = None

    @property
    def calls_function(self) -> bool:
        """True if a call is answered as `function_call`, as the API had it before there were tools."""
        return bool(self.functions) and not self.tools


def read_tools(
    asked: SettingsWithTools, limits: Limits, warnings: Warnings
) -> tuple[dict[str, Any], frozenset[str]]:
    """The tools of a request: those of `tools`, or of `functions`.

    What cannot be offered is left out, with a warning: agents send all tools that they know.

    Returns:
        Settings for GenerationConfig, and the names of tools that take a text instead of arguments.
    """
    given, custom = asked.tools, set()
    if asked.functions and not given:
        given = asked.functions
    if len(given) > limits.tool_count:
        raise UsageError(f"There are {len(given):,} tools.", f"At most {limits.tool_count:,} are allowed.")
    tools: dict[str, Tool] = {}
    for definition in given:
        tool = _tool(definition, warnings)
        if tool is None:
            continue
        if tools.setdefault(tool.name, tool) != tool:
            warnings.add(f"Left out the second tool that is named {shown(tool.name)}.")
        elif definition.type == "custom":
            custom.add(tool.name)
    size = sum(len(tool.parameters) + len(tool.description) for tool in tools.values())
    if size > limits.tools:
        raise UsageError(f"The tools have {size:,} characters.", f"At most {limits.tools:,} are allowed.")
    name, choice = "tool_choice", asked.tool_choice
    if choice is None and asked.function_call is not None:
        name, choice = "function_call", asked.function_call
    chosen, tools = _chosen(name, choice, tools, warnings, were_given=bool(given))
    if not tools:
        return {}, frozenset()
    settings = {"tools": tuple(tools.values()), "tool_choice": chosen}
    parallel = asked.parallel_tool_calls and not asked.calls_function
    return settings | {"parallel_tool_calls": parallel}, frozenset(custom)


def custom_input(arguments: str) -> str:
    """The text in the call of a custom tool; what there is of it if the answer was cut off."""
    value = arguments_of(arguments, "", Warnings()).get(CUSTOM_INPUT, "")
    return value if isinstance(value, str) else json.dumps(value)


def _tool(definition: ToolDefinition, warnings: Warnings) -> Tool | None:
    """The tool of a definition; None if only the API's own servers can run it."""
    kind = definition.type or "function"
    if kind == "custom":
        about = definition.custom or definition
        if about.format is not None and about.format.type == "grammar":
            warnings.add(f"The grammar of the tool {shown(about.name)} is shown to the model only.")
        return Tool.of({"name": about.name, "description": _described(about), "parameters": _TAKES_TEXT})
    if kind != "function":
        warnings.add(f"Left out a tool of the type {shown(kind)}, which cannot be run here.")
        return None
    function = definition.function or definition
    schema = function.parameters
    if schema is not None and not _describes_object(schema):
        warnings.ignored(
            f"the parameters of the tool {function.name}", "They must be the JSON schema of an object."
        )
        schema = {"additionalProperties": True}
    if schema:
        schema = {**schema, "type": "object"}
    return Tool.of({"name": function.name, "description": function.description, "parameters": schema})


def _described(about: ToolFunction) -> str:
    """The description of a custom tool, with the grammar of its input."""
    text = about.description or ""
    grammar = about.format and (about.format.grammar or about.format)
    if grammar is None or grammar.definition is None:
        return text
    return f"{text}\n\nThe input has this grammar ({grammar.syntax}):\n{grammar.definition}".strip()


def _describes_object(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type") or "object"
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _chosen(
    name: str,
    choice: str | ToolReference | None,
    tools: dict[str, Tool],
    warnings: Warnings,
    *,
    were_given: bool,
) -> tuple[str, dict[str, Tool]]:
    """The choice among tools, and those that may be called.

    Args:
        name: of the field with the choice.
        were_given: the request had tools, of which some may have been left out.
    """
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", tools
    if choice in ("required", "any"):
        if not tools and not were_given:
            raise UsageError(f"{name} requires a call, and there are no tools.", "Give tools.")
        if not tools:
            warnings.ignored(name, "None of the tools can be called here.")
        return "required", tools
    if isinstance(choice, ToolReference):
        if choice.type == "allowed_tools":
            return _allowed(choice.allowed_tools or choice, tools, warnings)
        if choice.named is None and choice.type not in (None, "function", "custom"):
            warnings.ignored(name, f"Tools of the type {shown(choice.type)} cannot be run here.")
            return "auto", tools
    named = choice.named if isinstance(choice, ToolReference) else choice
    if not named:
        raise wrong(name, named, f"{', '.join(CHOICES)}, or a function by its name")
    if named not in tools:
        raise UsageError(f"{name} names {shown(named)}, which is not one of the tools.")
    if named in CHOICES:  # which would be taken for the choice of that name
        return "required", {named: tools[named]}
    return named, tools


def _allowed(
    choice: ToolReference, tools: dict[str, Tool], warnings: Warnings
) -> tuple[str, dict[str, Tool]]:
    if choice.tools is None:
        raise UsageError('Missing "tool_choice.tools".')
    names = {item.named for item in choice.tools}
    allowed = {name: tool for name, tool in tools.items() if name in names}
    if not allowed:
        warnings.ignored("tool_choice", "None of the allowed tools is one of the tools.")
        return "none", tools
    return ("required" if choice.mode == "required" else "auto"), allowed
