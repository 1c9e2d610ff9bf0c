"""The steps of a structured answer: grammars, a thought, tool calls. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GrammarStep:
    """JSON that fits a schema, or a text that fits a grammar."""

    text: str  # of the schema or grammar
    # which of them it is, as `generation.config.Grammar` names it
    kind: Literal["json_schema", "grammar"] = "json_schema"
    # more of it may follow where it could end, so only the end of the answer ends it
    open_ended: bool = False
    quotes: str = ""  # what stands around texts in a grammar whose numbers shall end; see `Grammars.matcher`


@dataclass(frozen=True)
class ChoiceStep:
    """One of several sequences, each of which begins with a fixed text."""

    options: tuple[tuple[str, GrammarStep], ...]


Step = GrammarStep | ChoiceStep


@dataclass(frozen=True)
class Thought:
    """The thought before an answer.

    Attributes:
        opens, closes: its marks.
        opened: the prompt has opened it already.
        must: an answer has to begin with one.
        budget: most tokens of it; None sets no limit.
        cut: the text that ends it when the budget is spent.
        between: the text that comes between it and a grammar.
    """

    opens: bytes
    closes: bytes
    opened: bool
    budget: int | None
    cut: str
    between: str
    must: bool = False


@dataclass(frozen=True)
class ToolCallGrammar:
    """Tool calls within free text."""

    trigger: bytes  # what a call begins with
    steps: tuple[Step, ...]  # what has to follow it
    trigger_in_grammar: bool = False  # the trigger is part of the first grammar
    first_only: bool = False  # it counts only at the beginning
    repeats: bool = True  # the text is free again after a call
    required: bool = False  # the answer has to begin with one
    other_triggers: tuple[tuple[bytes, tuple[Step, ...]], ...] = ()  # further ones, and the steps behind each
    prompt_end: bytes = b""  # what the prompt ends with that a trigger may begin with
    forbidden: bool = False  # none may be made, so nothing may follow a trigger

    @property
    def triggers(self) -> tuple[tuple[bytes, tuple[Step, ...]], ...]:
        """Every trigger, and the steps behind it."""
        return ((self.trigger, self.steps), *self.other_triggers)
