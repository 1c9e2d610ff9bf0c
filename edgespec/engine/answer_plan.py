"""How an answer is constrained and taken apart: by its grammar, its thinking budget, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.models.text.answer_format import AnswerFormat, ThoughtFormat
from edgespec.models.text.answer_parts import AnswerParts, call_id
from edgespec.models.text.call_syntax import CallSyntax
from edgespec.models.text.encoding import Encoder
from edgespec.models.text.grammar import Grammars
from edgespec.models.text.outline import Outline
from edgespec.models.text.outline_steps import Calls, Choice, Form, Step, Thought
from edgespec.models.text.pieces import Pieces
from edgespec.speculation.constraint import Constraint, Matcher


@dataclass(frozen=True)
class AnswerPlan:
    """How one answer is constrained and taken apart.

    Attributes:
        constraint: None if it is free text.
        parts: takes it apart; None if it is nothing but text.
        shown: control tokens whose text counts, because they are marks.
    """

    constraint: Constraint | None = None
    parts: AnswerParts | None = None
    shown: frozenset[int] = frozenset()


class AnswerPlanner:
    """Plans answers for one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = Grammars(vocabulary)
        self._pieces: dict[frozenset[int], Pieces] = {}
        self._marks: dict[AnswerFormat, frozenset[int]] = {}

    def plan(
        self, encoder: Encoder, prompt: Sequence[int], config: GenerationConfig, *, raw: bool
    ) -> AnswerPlan:
        """The plan of the answer to a prompt.

        Args:
            raw: the answer goes on with a text, so nothing in it is a thought or a call.

        Raises:
            UsageError: the grammar library is missing.
            GrammarError: a grammar or schema cannot be used.
        """
        form = None if raw else encoder.format
        if form is None:
            return AnswerPlan(self._constraint(len(prompt), config.grammar))
        syntax = form.calls if config.offers_tools else None
        thought = form.thought
        if thought is None and syntax is None:
            return AnswerPlan(self._constraint(len(prompt), config.grammar))
        shown = self._shown(form)
        opened = encoder.begins_in_thought(prompt)
        parts = AnswerParts(thought, opened=opened, syntax=syntax, call_id=partial(call_id, tuple(prompt)))
        # A model that is not to think gets a closed thought, or is told by its template.
        thinks = thought is not None and (opened or config.thinking.enabled is not False)
        if not thinks and syntax is None:
            return AnswerPlan(self._constraint(len(prompt), config.grammar), parts, shown)
        if config.thinking.budget is None and syntax is None and config.grammar is None:
            return AnswerPlan(None, parts, shown)
        outline = self._outline(config, thought if thinks else None, syntax, shown, opened=opened)
        return AnswerPlan(self._constrained(len(prompt), outline, config), parts, shown)

    def _constraint(self, prompt_tokens: int, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        grammars = self._grammars
        return Constraint(
            grammars.matcher(grammar), prompt_tokens, grammars.ends, lambda: grammars.forget(grammar)
        )

    def _constrained(self, prompt_tokens: int, outline: Outline, config: GenerationConfig) -> Constraint:
        grammars = self._grammars
        used = [Grammar("json_schema", form.schema) for form in _forms(outline.calls)]
        used += [config.grammar] if config.grammar is not None else []

        def forget() -> None:
            for grammar in used:
                grammars.forget(grammar)

        for grammar in used:
            grammars.matcher(grammar)  # raises what is wrong with it, before anything is generated
        matcher: Matcher = outline
        return Constraint(matcher, prompt_tokens, grammars.ends, forget)

    def _outline(
        self,
        config: GenerationConfig,
        thought: ThoughtFormat | None,
        syntax: CallSyntax | None,
        shown: frozenset[int],
        *,
        opened: bool,
    ) -> Outline:
        grammar = config.grammar
        whole = None if grammar is None else partial(self._grammars.matcher, grammar)
        return Outline(
            self._pieces.setdefault(shown, Pieces(self._vocabulary, shown)),
            self._tokens,
            self._matcher,
            thought=None if thought is None else _thought(thought, config, opened=opened),
            calls=None if syntax is None else _calls(syntax, config),
            whole=whole,
        )

    def _matcher(self, schema: str) -> Any:
        return self._grammars.matcher(Grammar("json_schema", schema))

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text with marks, without the space that some tokenizers put first."""
        tokens = self._vocabulary.tokenize(text, control=True)
        begins_with_space = tokens and self._vocabulary.piece(tokens[0]) == b" " and not text.startswith(" ")
        return tokens[1:] if begins_with_space else tokens

    def _shown(self, form: AnswerFormat) -> frozenset[int]:
        """The control tokens in the marks of a format."""
        if form not in self._marks:
            thought, calls = form.thought, form.calls
            marks = [calls.trigger, calls.ends, calls.name_mark]
            if thought is not None:
                marks += [thought.opens, thought.closes, thought.between, *thought.introductions]
            vocabulary = self._vocabulary
            tokens = {token for mark in marks if mark for token in vocabulary.tokenize(mark, control=True)}
            self._marks[form] = frozenset(
                t for t in tokens if vocabulary.is_control(t) and not vocabulary.is_end(t)
            )
        return self._marks[form]


def _thought(form: ThoughtFormat, config: GenerationConfig, *, opened: bool) -> Thought:
    return Thought(
        opens=form.opens.encode(),
        closes=form.closes.encode(),
        opened=opened,
        budget=config.thinking.budget,
        cut=form.cut,
        between=form.between,
        must=bool(form.introductions),
    )


def _calls(syntax: CallSyntax, config: GenerationConfig) -> Calls:
    required = config.tool_choice != "auto"
    named = [tool for tool in config.tools if tool.name == config.tool_choice]
    return Calls(
        trigger=syntax.trigger.encode(),
        steps=syntax.steps(named or config.tools, several=config.parallel_tool_calls and not named),
        fed=syntax.trigger_is_json,
        first_only=syntax.first_only,
        repeats=syntax.repeats and config.parallel_tool_calls and not named,
        required=required,
    )


def _forms(calls: Calls | None) -> list[Form]:
    steps: list[Step] = [] if calls is None else [*calls.steps]
    steps += [form for step in steps if isinstance(step, Choice) for _, form in step.options]
    return [step for step in steps if isinstance(step, Form)]
