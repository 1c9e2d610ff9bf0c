"""The syntaxes of tool calls: learned from chat templates, or known of families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgespec.generation.tools import Tool
from edgespec.text.calls import gemma, harmony
from edgespec.text.calls.derivation import DerivedCalls
from edgespec.text.calls.layout import CallLayout
from edgespec.text.calls.pythonic import PythonicSpelling
from edgespec.text.calls.reader import CallReader
from edgespec.text.calls.spelling import LayoutSpelling
from edgespec.text.structured_output.steps import GrammarStep, Step


class CallSpelling(Protocol):
    """Spells and reads calls, by a grammar of its own."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""

    @property
    def goes_on(self) -> bool:
        """True if the text behind a call may be the end of all, or the beginning of what leads to another."""

    @property
    def quotes(self) -> str:
        """The text around all texts; empty if some stand between other marks."""

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        """The grammar of a call of one of these tools behind the trigger, and of more behind the same one.

        Args:
            controls: the tokens of marks that are control tokens.
            several: whether more than one call may come.

        Raises:
            UsageError: the arguments of one cannot be spelled.
        """

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads the calls behind a trigger."""

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls (names and arguments) as the model writes them, for templates that do not show calls."""


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of a model's tool calls."""

    name: str  # of the family; empty if the syntax was learned from a template
    trigger: str  # the text with which a call begins
    spelling: CallSpelling | None  # of calls; None if they are messages of their own (`in_channels`)
    first_only: bool = False  # the trigger counts only at the beginning of the answer
    trigger_is_json: bool = False  # the trigger is a part of the call's JSON
    shows_tools: bool = True  # the template shows the tools itself
    shows_calls: bool = True  # the template shows earlier calls itself
    shows_results: bool = True  # the template shows what tools return
    in_channels: bool = False  # a call is a message of its own, with its name in the header (`harmony`)
    in_fences: bool = False  # models of the family also write calls as JSON in a code fence (`fenced`)
    results_in_calls: bool = False  # the template wants results in the message of the calls (`gemma`)
    single: bool = False  # the template takes at most one call in a message
    arguments_as_text: bool = False  # the template takes arguments as JSON text
    empty_content: str | None = ""  # the content of a message that only calls, as the template takes it

    @property
    def repeats(self) -> bool:
        """True if another call may follow, with a trigger of its own."""
        return self.spelling is not None and not self.first_only

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        if self.spelling is None:
            return harmony.MARKS
        return (self.trigger, *self.spelling.marks)

    def steps(
        self, tools: Sequence[Tool], controls: Mapping[str, int] | None = None, *, several: bool
    ) -> tuple[Step, ...]:
        """Return the steps that have to follow the trigger.

        Args:
            tools: with schemas that can be enforced (`enforceable.closed`).
            controls: the tokens of marks that are control tokens.
            several: whether an answer may call more than one.

        Raises:
            UsageError: the arguments of a tool cannot be spelled.
        """
        if self.spelling is None:
            return (harmony.step_of({tool.name: tool.parameters for tool in tools}, self.trigger),)
        grammar = self.spelling.grammar(tools, controls or {}, several=several)
        open_ended = several and self.spelling.goes_on
        return (GrammarStep(grammar, "grammar", open_ended=open_ended, quotes=self.spelling.quotes),)

    def more_triggers(self, tools: Sequence[Tool]) -> dict[str, tuple[Step, ...]]:
        """List other texts with which a call may begin, and what has to follow each."""
        if not self.in_channels:
            return {}
        schemas = {tool.name: tool.parameters for tool in tools}
        return {trigger: (harmony.step_of(schemas, trigger),) for trigger in harmony.MORE_TRIGGERS}

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Return the reader of the calls behind a trigger."""
        assert self.spelling is not None, "channels are read otherwise"
        return self.spelling.reader(tools)


HERMES_LAYOUT = CallLayout('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
_GRANITE_LAYOUT = CallLayout('<|tool_call|>[{"name": "', '", "arguments": ', "}]", between='}, {"name": "')


def _laid_out(name: str, layout: CallLayout, trigger: str, **more: Any) -> CallSyntax:
    return CallSyntax(name, trigger, LayoutSpelling(layout, trigger), **more)


GEMMA = CallSyntax("Gemma 4", gemma.TRIGGER, gemma.BRACES)
HARMONY = CallSyntax("gpt-oss", harmony.TRIGGER, None, in_channels=True, single=True)
# These list tools and do not show calls.
LFM2 = CallSyntax(
    "LFM2",
    "<|tool_call_start|>",
    PythonicSpelling("<|tool_call_start|>", "<|tool_call_end|>"),
    shows_calls=False,
)
GRANITE = _laid_out("Granite 3", _GRANITE_LAYOUT, "<|tool_call|>", shows_calls=False)
SMOLLM3 = _laid_out("SmolLM3", HERMES_LAYOUT, "<tool_call>", shows_calls=False)
GENERIC = _laid_out(
    "generic", HERMES_LAYOUT, "<tool_call>", shows_tools=False, shows_calls=False, shows_results=False
)


def family_of(template: str) -> CallSyntax | None:
    """The syntax of a family whose chat template (Jinja source) does not tell it by what it shows."""
    if harmony.is_harmony(template) and "functions." in template:
        return HARMONY
    if gemma.TRIGGER in template and gemma.QUOTE in template:
        return replace(GEMMA, results_in_calls="tool_call_id" not in template)
    return None


def listing_family_of(template: str) -> CallSyntax | None:
    """The syntax of a family whose chat template (Jinja source) lists tools, and shows no calls."""
    if "List of tools: " in template:
        return LFM2
    if "<|tool_call|>" in template and "available_tools" in template:
        return GRANITE
    if "xml_tools" in template and "<tool_call>" in template:
        return SMOLLM3
    return None


def learned(derived: DerivedCalls, template: str) -> CallSyntax:
    """The syntax that renderings of a chat template (Jinja source) have shown."""
    # Qwen2.5 and what was tuned from it. Their successors, which think, keep to the marks.
    spelling = derived.spelling
    fences = isinstance(spelling, LayoutSpelling) and spelling.layout == HERMES_LAYOUT
    fences = fences and "</think>" not in template
    return CallSyntax(
        "",
        derived.trigger,
        spelling,
        first_only=derived.trigger_is_json,
        trigger_is_json=derived.trigger_is_json,
        in_fences=fences,
        single=derived.single,
        shows_results=derived.shows_results,
        arguments_as_text=derived.arguments_as_text,
        empty_content=derived.empty_content,
    )


def described(tools: Sequence[Tool], syntax: CallSyntax) -> str:
    """A system message that describes tools, for a template that does not, and how to call them."""
    assert syntax.spelling is not None, "channels show tools"
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    example = syntax.spelling.written([("NAME", {"ARGUMENT": "VALUE"})])
    return (
        "You may call functions. They are described within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        f"To call one, answer with its name and arguments in this form:\n{example}"
    )
