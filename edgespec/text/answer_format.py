"""The format of a model's answers, read from its chat template: thoughts before them, and tool calls.

Models mark both with texts of their own, often control tokens. A chat template has to know these marks, to
drop earlier thoughts and to show earlier calls, so they are found in its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from edgespec.text.calls import harmony
from edgespec.text.calls.derivation import Messages, derive, shown_texts
from edgespec.text.calls.syntax import GENERIC, CallSyntax, family_of, learned, listing_family_of
from edgespec.text.calls.text_tags import TextTags, text_tags_of


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks of thoughts.

    Attributes:
        opens, closes: the marks around a thought.
        between: what follows the closing mark, where the answer has to begin in a certain way.
        introductions: marks that may stand before the answer and are no part of it.
        again: what begins the next message, where thoughts, calls and answers are messages of their own.
        switch: the template's variable that turns thinking on and off; empty if it has none.
        knows_effort: whether it has a variable `reasoning_effort`.
        high: its word for a high effort.
        knows_budget: whether it has a variable `thinking_budget`.
    """

    opens: str
    closes: str
    between: str = "\n\n"
    introductions: tuple[str, ...] = ()
    again: str = ""
    switch: str = ""
    knows_effort: bool = False
    knows_budget: bool = False
    high: str = "high"

    def switched(self, on: bool) -> bool | str:
        """The value of the switch that turns thinking on or off."""
        return _MODES[on] if self.switch == _MODE else on

    def behind(self, *, calls: bool) -> str:
        """The text between a thought and what follows it, a call perhaps."""
        return self.again if self.again and calls else self.between

    def cut(self, *, calls: bool) -> str:
        """The text that ends a thought whose budget is spent; a call may follow."""
        space = "" if self.again else "\n"
        return f"{space}{self.closes}{self.behind(calls=calls)}"

    def skipped(self, *, calls: bool) -> str:
        """The text put before an answer that is to have no thought, and may be a call."""
        if self.again and not calls:
            return self.introductions[-1]
        space = "" if self.again else "\n\n"
        return f"{self.opens}{space}{self.closes}{self.behind(calls=calls)}"


Show = Callable[[Messages, Mapping[str, Any], bool], str | None]
"""Renders a conversation with variables, up to where the model answers if it is to; None if it is refused."""


class AnswerFormat:
    """The format of answers.

    Args:
        template: the chat template (Jinja source).
        show: renders conversations, from which the syntax of calls is learned when tools are first used.
        is_end: whether a mark is the text of a token that ends answers.

    Attributes:
        in_channels: thoughts, calls and answers are messages of their own (`harmony`).
    """

    def __init__(
        self,
        template: str,
        show: Show = lambda messages, variables, begin_answer: None,
        is_end: Callable[[str], bool] = lambda mark: False,
    ) -> None:
        self._template = template
        self._code = _code(template)
        self._show = show
        self._is_end = is_end
        self._family = family_of(template) if self._shows_tools else None
        self.in_channels = self._family is not None and self._family.in_channels

    @cached_property
    def thought(self) -> ThoughtFormat | None:
        """The marks of thoughts; None if the model does not think."""
        known = self._known_thought
        tags = self.text_tags
        if known is not None or tags is None:
            return known
        return _with_switches(
            ThoughtFormat(tags.thought_opens, tags.thought_closes, tags.text_opens, (tags.text_opens,)),
            self._template,
            self._code,
        )

    @cached_property
    def text_tags(self) -> TextTags | None:
        """The tags around texts; None if there are none."""
        if self._known_thought is not None or self.in_channels:
            return None
        shown = shown_texts(self._shown)
        return None if shown is None else text_tags_of(*shown)

    @cached_property
    def _known_thought(self) -> ThoughtFormat | None:
        return _thought(self._template, self._code)

    @cached_property
    def calls(self) -> CallSyntax:
        """The syntax of calls; GENERIC if the template does not tell."""
        if self._family is not None:
            return self._family
        if self._shows_tools or "tool_calls" in self._template:
            derived = derive(
                self._shown,
                thought_closes=self.thought.closes if self.thought is not None else "",
                text_closes=self.text_tags.text_closes if self.text_tags is not None else "",
                is_end=self._is_end,
            )
            if derived is not None:
                syntax = learned(derived, self._template)
                return replace(syntax, shows_tools=self._shows_tools)
        return (listing_family_of(self._template) if self._shows_tools else None) or GENERIC

    def _shown(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], begin_answer: bool
    ) -> str | None:
        return self._show(messages, self.tool_variables(tools) if tools else {}, begin_answer)

    def tool_variables(self, definitions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The variables by which the template gets the definitions of tools."""
        found: dict[str, Any] = {name: definitions for name in ("tools", "xml_tools") if self._uses(name)}
        if self._uses("functions") and not found:  # Firefunction
            found["functions"] = json.dumps(list(definitions), indent=4)
            found["datetime"] = f"{datetime.now():%Y-%m-%d}"
        return found

    @property
    def _shows_tools(self) -> bool:
        return any(map(self._uses, ("tools", "xml_tools", "functions")))

    def _uses(self, name: str) -> bool:
        return _uses(self._code, name)


# The marks of the families, in the order in which they are looked for.
_MARKS = (
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<think>", "</think>"),  # DeepSeek R1, Qwen, GLM, SmolLM3, EXAONE, Hunyuan, and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
_HIGH = ("high", "xhigh")  # Qwen 3.8 knows only the latter
_NOTHING_BETWEEN = ("<channel|>",)
_MODE, _MODES = "thinking_mode", ("disabled", "enabled")  # MiniMax M3
_SWITCHES = ("enable_thinking", "thinking", _MODE)
_NEXT_FINAL = f"{harmony.ASSISTANT}{harmony.FINAL}"
_OPENS, _CLOSES = re.compile(r"\{[{%]"), re.compile(r"[%}]\}")
# One that is not closed ends with the text: it is not looked for again from each quote in it.
_STRING = re.compile(r"'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)", re.DOTALL)


def _thought(template: str, code: str) -> ThoughtFormat | None:
    """The marks of thoughts that a template has in its source."""
    if harmony.is_harmony(template):
        introductions = (_NEXT_FINAL, harmony.FINAL)
        thought = ThoughtFormat(harmony.ANALYSIS, harmony.END, _NEXT_FINAL, introductions, harmony.ASSISTANT)
        return replace(_with_switches(thought, template, code), high=ThoughtFormat.high)
    for opens, closes in _MARKS:
        # Some templates know only the closing mark, by which they cut earlier thoughts off.
        if closes in template:
            between = "" if closes in _NOTHING_BETWEEN else ThoughtFormat.between
            return _with_switches(ThoughtFormat(opens, closes, between), template, code)
    return None


def _with_switches(thought: ThoughtFormat, template: str, code: str) -> ThoughtFormat:
    """The format of thoughts with the variables by which a template controls them."""
    return replace(
        thought,
        switch=next((name for name in _SWITCHES if _uses(code, name)), ""),
        knows_effort=_uses(code, "reasoning_effort"),
        knows_budget=_uses(code, "thinking_budget"),
        high=next((word for word in _HIGH if re.search(rf"['\"]{word}['\"]", template)), _HIGH[0]),
    )


def _code(template: str) -> str:
    """Return what is between a template's tags, without strings. Linear time: templates are untrusted."""
    parts = []
    start = _OPENS.search(template)
    while start is not None:
        end = _CLOSES.search(template, start.end())
        if end is None:
            break
        parts.append(_STRING.sub("''", template[start.end() : end.start()]))
        start = _OPENS.search(template, end.end())
    return "\n".join(parts)


def _uses(code: str, name: str) -> bool:
    """True if a template's code uses a variable of that name, and not merely an attribute."""
    return re.search(rf"(?<![\w.]){name}(?!\w)", code) is not None
