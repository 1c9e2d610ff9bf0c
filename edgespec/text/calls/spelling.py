"""Grammars and readers of calls that follow a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.tools import Tool
from edgespec.text.calls.argument_rules import ArgumentRules
from edgespec.text.calls.argument_values import ANY_VALUE, SchemaReader
from edgespec.text.calls.layout import (
    KEY,
    SPACE_RULE,
    CallLayout,
    pattern,
    rule,
)
from edgespec.text.calls.reader import CallReader, JsonCallReader
from edgespec.text.calls.tagged import TaggedCallReader

_MARK = re.compile(r"\]<\]\w+\[>\[|<[^<>\s]*>|\[[A-Z_/]+\]")  # as in probes


@dataclass(frozen=True)
class LayoutSpelling:
    """Spells calls of a layout; see `syntax.CallSpelling`."""

    layout: CallLayout
    trigger: str  # the part of the layout's first text that is read before the call; empty if none is

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in it that may be control tokens."""
        layout = self.layout
        texts = [layout.opens, layout.middle, layout.closes, layout.between]
        if layout.tags is not None:
            texts += [layout.tags.opens, layout.tags.closes, *(text for _, text in layout.tags.middles)]
        return tuple(dict.fromkeys(mark for text in texts for mark in _MARK.findall(text)))

    @property
    def quotes(self) -> str:
        return '"' if self.layout.tags is None and self.trigger.count('"') % 2 == 0 else ""

    def grammar(self, tools: Sequence[Tool], controls: Mapping[str, int], *, several: bool) -> str:
        """The grammar of a call of these tools behind the trigger, and of more in the same section.

        Args:
            controls: the tokens of marks that are control tokens.
            several: whether more than one may come.

        Raises:
            UsageError: the arguments of a tool cannot be spelled.
        """
        layout = self.layout
        lines = [SPACE_RULE]
        for n, tool in enumerate(tools):
            lines += self._call(f"call_{n}", tool, controls)
        lines.append(f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}")
        more = f"({rule(layout.between, controls)} call)*" if several and layout.between else ""
        parts = [rule(self._rest, controls), "call", more, rule(layout.closes.rstrip(), controls)]
        return "\n".join([f"start: {' '.join(filter(None, parts))}", *lines])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads a call behind the trigger."""
        layout = self.layout
        first, ends = pattern(self._rest), pattern(layout.closes.strip())
        following = pattern(layout.between) if layout.between else ""
        if layout.tags is None:
            head = rf"([\w.-]+){pattern(layout.middle)}(?=\{{)"
            return JsonCallReader(
                re.compile(rf"\s*{first}{head}"),
                re.compile(rf"\s*{following}{head}") if following else None,
                re.compile(rf"\s*{ends}") if ends and not self.goes_on else None,
            )
        return TaggedCallReader(
            layout.tags, layout.middle, tools, first=first, following=following, ends=ends
        )

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls (names and arguments) as the model writes them; their arguments are JSON."""
        return self.layout.written(calls)

    @property
    def goes_on(self) -> bool:
        """True if the text that ends a section also stands between its calls."""
        return bool(self.layout.between) and self.layout.between.startswith(self.layout.closes)

    @property
    def _rest(self) -> str:
        """The text between the trigger and the first name."""
        return self.layout.opens.removeprefix(self.trigger)

    def _call(self, name: str, tool: Tool, controls: Mapping[str, int]) -> list[str]:
        tags = self.layout.tags
        opens = rule(tool.name + self.layout.middle, controls)
        schemas = SchemaReader(tool)
        if tags is None:
            return [f"{name}: {opens} {schemas.json_rule({'type': 'object', **schemas.schema})}"]
        lines, arguments, required = [], [], set(schemas.required)
        for m, (key, schema) in enumerate(schemas.listed.items()):
            lines += ArgumentRules(tags, controls, schemas, f"{name}_{m}").rules(key, schemas.value(schema))
            arguments.append(f"{name}_{m}{'' if key in required else '?'}")
        if schemas.takes_any and KEY not in tags.closes:
            lines += ArgumentRules(tags, controls, schemas, f"{name}_any").rules("", ANY_VALUE)
            arguments.append(f"{name}_any*")
        return [f"{name}: {' '.join([opens, *arguments])}", *lines]
