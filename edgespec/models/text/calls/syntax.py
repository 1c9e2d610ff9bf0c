"""The syntaxes of tool calls in the model families, found by a model's chat template.

A template that knows none of them gets the tools described in its system message, with Hermes' syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.models.text.calls import gemma, harmony, tagged
from edgespec.models.text.calls.closed_arguments import closed
from edgespec.models.text.calls.reader import CallReader, JsonCallReader
from edgespec.models.text.structured_output.steps import ChoiceStep, FixedStep, GrammarStep, Step


class CallSpelling(Protocol):
    """Spells calls whose arguments are not JSON as a whole, by a grammar of their own."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""

    def grammar(self, tools: Sequence[Tool]) -> str:
        """The grammar of a call of one of these tools, behind the trigger.

        Raises:
            UsageError: the arguments of one cannot be spelled.
        """

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads a call behind the trigger."""


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of a family's tool calls.

    Attributes:
        name: of the family.
        trigger: the text with which a call begins.
        lead: what has to follow the trigger, before the call itself.
        ends: what has to follow the call; empty if nothing does.
        first_only: the trigger counts only at the beginning of the answer.
        trigger_is_json: the trigger is a part of the call's JSON.
        is_list: calls are the items of a JSON list.
        name_mark: where the name stands before the arguments instead of within JSON, what is between them.
        arguments: what JSON calls the arguments.
        in_template: the template shows the tools and earlier calls itself.
        spelling: of calls whose arguments are not JSON as a whole.
        in_channels: a call is a message of its own, with its name in the header (`harmony`).
        in_fences: models of the family also write calls as JSON in a code fence (`fenced`).
        results_in_calls: the template wants results in the message of the calls (`gemma`).
    """

    name: str
    trigger: str
    lead: str = ""
    ends: str = ""
    first_only: bool = False
    trigger_is_json: bool = False
    is_list: bool = False
    name_mark: str = ""
    arguments: str = "arguments"
    in_template: bool = True
    spelling: CallSpelling | None = None
    in_channels: bool = False
    in_fences: bool = False
    results_in_calls: bool = False

    @property
    def repeats(self) -> bool:
        """True if another call may follow, with a trigger of its own."""
        return bool(self.ends or self.name_mark or self.spelling)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        if self.in_channels:
            return harmony.MARKS
        own = (self.trigger, self.ends, self.name_mark)
        return tuple(mark for mark in (*own, *(self.spelling.marks if self.spelling else ())) if mark)

    def steps(self, tools: Sequence[Tool], *, several: bool) -> tuple[Step, ...]:
        """Return the steps that have to follow the trigger.

        Args:
            several: whether an answer may call more than one.

        Raises:
            UsageError: the arguments of a tool cannot be spelled.
        """
        tools = [closed(tool) for tool in tools]
        if self.in_channels:
            return (harmony.step_of({tool.name: tool.parameters for tool in tools}, self.trigger),)
        if self.spelling is not None:
            return (GrammarStep(self.spelling.grammar(tools), "grammar"),)
        if self.name_mark:
            return (
                ChoiceStep(
                    tuple(
                        (FixedStep(tool.name + self.name_mark), GrammarStep(tool.parameters))
                        for tool in tools
                    )
                ),
            )
        call = {"anyOf": [self._call(tool) for tool in tools]} if len(tools) > 1 else self._call(tools[0])
        schema: dict[str, Any] = call
        if self.is_list:
            schema = {"type": "array", "items": call, "minItems": 1}
            if not several:
                schema["maxItems"] = 1
        return (
            *([FixedStep(self.lead)] if self.lead else []),
            GrammarStep(json.dumps(_with_definitions(schema, tools))),
            *([FixedStep(self.ends)] if self.ends else []),
        )

    def more_triggers(self, tools: Sequence[Tool]) -> dict[str, tuple[Step, ...]]:
        """List other texts with which a call may begin, and what has to follow each."""
        if not self.in_channels:
            return {}
        schemas = {tool.name: closed(tool).parameters for tool in tools}
        return {trigger: (harmony.step_of(schemas, trigger),) for trigger in harmony.MORE_TRIGGERS}

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Return the reader of the calls behind a trigger."""
        if self.spelling is not None:
            return self.spelling.reader(tools)
        return JsonCallReader(self._head, self.ends, repeats=self.repeats)

    @property
    def _head(self) -> re.Pattern[str]:
        """Match what stands before the arguments of a call; group 1 is the name, in quotes if it is JSON."""
        if self.name_mark:
            return re.compile(rf"\s*([\w.-]+){re.escape(self.name_mark)}\s*")
        return re.compile(
            rf'[\s\[,}}]*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{self.arguments}"\s*:\s*', re.DOTALL
        )

    def _call(self, tool: Tool) -> dict[str, Any]:
        schema = tool.schema
        schema.pop("$defs", None)
        schema.pop("definitions", None)
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.arguments: {"type": "object", **schema}},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


HERMES = CallSyntax("Hermes", "<tool_call>", lead="\n", ends="\n</tool_call>")
LLAMA = CallSyntax("Llama 3", '{"name":', first_only=True, trigger_is_json=True, arguments="parameters")
MISTRAL = CallSyntax("Mistral", "[TOOL_CALLS]", is_list=True)
MISTRAL_NAMED = CallSyntax("Mistral with [ARGS]", "[TOOL_CALLS]", name_mark="[ARGS]")
# Qwen2.5 and what was tuned from it. Their successors, which think, keep to the marks.
HERMES_OR_FENCES = replace(HERMES, name="Hermes or fences", in_fences=True)
QWEN_CODER = CallSyntax("Qwen3-Coder", "<tool_call>", spelling=tagged.QWEN_CODER)
GLM = CallSyntax("GLM", "<tool_call>", spelling=tagged.GLM)
GEMMA = CallSyntax("Gemma 4", gemma.TRIGGER, spelling=gemma.BRACES)
HARMONY = CallSyntax("gpt-oss", harmony.TRIGGER, in_channels=True)
GENERIC = CallSyntax("generic", "<tool_call>", lead="\n", ends="\n</tool_call>", in_template=False)


def syntax_of(template: str, *, knows_tools: bool) -> CallSyntax:
    """The syntax that a chat template (Jinja source) teaches; GENERIC where it is none known here."""
    if not knows_tools:
        return GENERIC
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if harmony.is_harmony(template) and "functions." in template:
        return HARMONY
    if gemma.TRIGGER in template and gemma.QUOTE in template:
        return replace(GEMMA, results_in_calls="tool_call_id" not in template)
    if "<tool_call>" in template:
        if "<arg_key>" in template and "<arg_value>" in template:
            return GLM
        if "<function=" in template and "<parameter=" in template:
            return QWEN_CODER
        return HERMES if "</think>" in template else HERMES_OR_FENCES
    if re.search(r"ipython|<\|python_tag\|>", template) and re.search(r"[\"']parameters\\?[\"']", template):
        return LLAMA
    return GENERIC


def described(tools: Sequence[Tool]) -> str:
    """A system message that teaches GENERIC."""
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. They are described within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call one, answer with a JSON object that has its name and arguments, within "
        "<tool_call></tool_call>:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    )


def without_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Rewrite a conversation for a template that knows neither tools nor calls nor their results."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]})
                for c in message["tool_calls"]
            ]
            blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
            text = "\n".join([*filter(None, [message.get("content")]), *blocks])
            plain.append({"role": "assistant", "content": text})
        elif message.get("role") == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if plain and plain[-1].get("results"):  # templates want questions and answers to alternate
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "results": True})
        else:
            plain.append(dict(message))
    for message in plain:
        message.pop("results", None)
    if not tools:
        return plain
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{described(tools)}"}, *plain[1:]]
    return [{"role": "system", "content": described(tools)}, *plain]


def _with_definitions(schema: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema with the definitions that the tools refer to, which references seek at the root."""
    for key in ("$defs", "definitions"):
        found: dict[str, Any] = {}
        for tool in tools:
            for name, definition in tool.schema.get(key, {}).items():
                if found.setdefault(name, definition) != definition:
                    raise UsageError(
                        f"The schemas of two tools define '{name}' differently.", "Give one another name."
                    )
        if found:
            schema = {**schema, key: found}
    return schema
