"""The constraints of an answer, and its parts: its grammar, its thinking budget, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from edgespec.errors import GrammarError, UsageError
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.generation.tools import CHOICES, Tool
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.constraint import Constraint, Matcher
from edgespec.text.answer_format import AnswerFormat, ThoughtFormat
from edgespec.text.answer_parts import PartsReader
from edgespec.text.calls import harmony
from edgespec.text.calls.enforceable import closed, not_enforced, unconstrained
from edgespec.text.calls.fenced import FenceReader
from edgespec.text.calls.syntax import CallSyntax
from edgespec.text.encoding import Encoder
from edgespec.text.grammar.limits import is_plain
from edgespec.text.grammar.matchers import Grammars, check_grammar
from edgespec.text.grammar.schemas import EndlessReference
from edgespec.text.reading import reader_of
from edgespec.text.structured_output.answer_matcher import AnswerMatcher
from edgespec.text.structured_output.steps import ChoiceStep, GrammarStep, Thought, ToolCallGrammar
from edgespec.text.structured_output.token_bytes import TokenBytes

_KEPT_CALLS = 8
_MAX_TRIALS = 8  # schemas of the tools of a request that are tried in child processes


@dataclass(frozen=True)
class AnswerPlan:
    """The constraints and the parts of one answer."""

    constraint: Constraint | None = None  # None if it is free text
    parts: PartsReader | None = None  # takes it apart; None if it is nothing but text
    shown: frozenset[int] = frozenset()  # control tokens whose text counts, because they are marks


@dataclass(frozen=True)
class _OfferedCalls:
    """Tools with schemas that are enforced, their grammar, and sentences about schemas that are not."""

    tools: tuple[Tool, ...]
    grammar: ToolCallGrammar
    not_enforced: tuple[str, ...]


class AnswerPlanner:
    """Plans answers for one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = Grammars(vocabulary)
        self._token_bytes: dict[frozenset[int], TokenBytes] = {}
        self._marks: dict[tuple[AnswerFormat, bool], frozenset[int]] = {}
        self._offered = lru_cache(_KEPT_CALLS)(self._offer)

    def plan(
        self, encoder: Encoder, prompt: Sequence[int], config: GenerationConfig, *, raw: bool
    ) -> AnswerPlan:
        """The plan of the answer to a prompt.

        Args:
            raw: the answer continues a text, so nothing in it is a thought or a call.

        Raises:
            UsageError: the grammar library is missing.
            GrammarError: a grammar or schema cannot be used.
        """
        form = None if raw else encoder.format
        if form is None:
            return AnswerPlan(self._constraint(len(prompt), config.grammar))
        syntax = form.calls if config.offers_tools else None
        shown_only = bool(config.tools) and syntax is None and config.grammar is None
        thought = form.thought
        if thought is None and syntax is None and not shown_only:
            return AnswerPlan(self._constraint(len(prompt), config.grammar))
        shown = self._shown(form, calls=bool(config.tools))
        opened = encoder.begins_in_thought(prompt)
        fences = self._fences(syntax, config) if syntax is not None else None
        offered = None
        if syntax is not None:
            offered = self._offered(syntax, config.tools, config.tool_choice, config.parallel_tool_calls)
        tools = offered.tools if offered is not None else ()
        parts = reader_of(
            form,
            opened=opened,
            budgeted=config.thinking.budget is not None,
            tools=tools,
            fences=fences,
            prompt=prompt,
        )
        # A model that is not to think gets a closed thought, or is told by its template.
        thinks = thought is not None and (opened or config.thinking.enabled is not False)
        if not thinks and syntax is None and not shown_only:
            return AnswerPlan(self._constraint(len(prompt), config.grammar), parts, shown)
        free = syntax is None and config.grammar is None and not shown_only
        if config.thinking.budget is None and free:
            return AnswerPlan(None, parts, shown)
        calls = offered.grammar if offered is not None else None
        if shown_only:
            calls = _no_calls(form.calls, config.tools)
        thinking = None if thought is None or not thinks else _thought(thought, syntax, config, opened=opened)
        matcher = self._answer_matcher(config, thinking, calls, shown, _text_opens(syntax))
        return AnswerPlan(self._constrained(len(prompt), matcher, config), parts, shown)

    def _constraint(self, prompt_tokens: int, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        grammars = self._grammars
        return Constraint(
            grammars.matcher(grammar), prompt_tokens, grammars.ends, lambda: grammars.forget(grammar)
        )

    def _constrained(self, prompt_tokens: int, answer: AnswerMatcher, config: GenerationConfig) -> Constraint:
        grammars = self._grammars
        used = [Grammar(step.kind, step.text) for step in _grammar_steps(answer.calls)]
        used += [config.grammar] if config.grammar is not None else []

        def forget() -> None:
            for grammar in used:
                grammars.forget(grammar)

        for grammar in used:
            grammars.matcher(grammar)  # raises what is wrong with it, before anything is generated
        matcher: Matcher = answer
        return Constraint(matcher, prompt_tokens, grammars.ends, forget)

    def _answer_matcher(
        self,
        config: GenerationConfig,
        thought: Thought | None,
        calls: ToolCallGrammar | None,
        shown: frozenset[int],
        text_opens: str,
    ) -> AnswerMatcher:
        grammar = config.grammar
        whole = None if grammar is None else partial(self._grammars.matcher, grammar)
        return AnswerMatcher(
            self._token_bytes.setdefault(shown, TokenBytes(self._vocabulary, shown)),
            self._tokens,
            self._matcher,
            thought=thought,
            calls=calls,
            whole=whole,
            whole_opens=text_opens,
        )

    def not_enforced(self, encoder: Encoder, config: GenerationConfig) -> tuple[str, ...]:
        """Name the schemas that the answer or its calls need not fit, in sentences. Thread-safe.

        What it compiles is kept, so that `plan` need not wait for it.

        Raises:
            UsageError, GrammarError, InconclusiveTrial: as `plan`.
        """
        sentences: tuple[str, ...] = ()
        if config.grammar is not None:
            self._grammars.matcher(config.grammar)
            if config.grammar.kind == "json_schema" and not check_grammar(config.grammar):
                sentences = ("Parts of the schema of the answer are not enforced.",)
        if encoder.format is None or not config.offers_tools:
            return sentences
        syntax = encoder.format.calls
        offered = self._offered(syntax, config.tools, config.tool_choice, config.parallel_tool_calls)
        return sentences + offered.not_enforced

    def _offer(
        self, syntax: CallSyntax, tools: tuple[Tool, ...], choice: str, parallel: bool
    ) -> _OfferedCalls:
        """The calls of tools: a tool whose arguments cannot be bound takes any."""
        sentences, spelled, trials = [], [], 0
        for tool in [tool for tool in tools if tool.name == choice] or tools:
            trials += not is_plain(Grammar("json_schema", tool.parameters))
            try:
                if trials > _MAX_TRIALS:
                    raise GrammarError(
                        f"The schemas of {_MAX_TRIALS} other tools are as expensive.", "Simplify it."
                    )
                sentence, enforced = not_enforced(tool), closed(tool)
                syntax.steps([enforced], several=False)
            except EndlessReference:
                raise
            except UsageError as error:
                sentence = f"The schema of the tool {tool.name} is not enforced. {error}"
                enforced = unconstrained(tool)
            sentences += [sentence] if sentence else []
            spelled.append(enforced)
        several = parallel and choice in CHOICES
        grammar = self._calls(syntax, spelled, required=choice != "auto", several=several)
        try:
            for step in _grammar_steps(grammar):
                self._matcher(step)
        except GrammarError as error:
            sentences.append(f"The schemas of the tools are not enforced. {error}")
            spelled = [unconstrained(tool) for tool in spelled]
            grammar = self._calls(syntax, spelled, required=choice != "auto", several=several)
        return _OfferedCalls(tuple(spelled), grammar, tuple(sentences))

    def _calls(
        self, syntax: CallSyntax, tools: Sequence[Tool], *, required: bool, several: bool
    ) -> ToolCallGrammar:
        controls = self._controls(syntax)
        others = syntax.more_triggers(tools)
        return ToolCallGrammar(
            trigger=syntax.trigger.encode(),
            steps=syntax.steps(tools, controls, several=several),
            trigger_in_grammar=syntax.trigger_is_json,
            first_only=syntax.first_only,
            repeats=syntax.repeats and several,
            required=required,
            other_triggers=tuple((trigger.encode(), steps) for trigger, steps in others.items()),
            prompt_end=_prompt_end(syntax),
        )

    def _fences(self, syntax: CallSyntax, config: GenerationConfig) -> FenceReader | None:
        """Return the reader that tells which code fences are tool calls; None if the model has none."""
        if not syntax.in_fences or config.tool_choice != "auto" or config.grammar is not None:
            return None
        return FenceReader(config.tools, several=config.parallel_tool_calls)

    def _matcher(self, step: GrammarStep) -> Any:
        return self._grammars.matcher(Grammar(step.kind, step.text), step.quotes)

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text with marks, without the space that some tokenizers put first."""
        tokens = self._vocabulary.tokenize(text, control=True)
        begins_with_space = tokens and self._vocabulary.piece(tokens[0]) == b" " and not text.startswith(" ")
        return tokens[1:] if begins_with_space else tokens

    def _shown(self, form: AnswerFormat, *, calls: bool) -> frozenset[int]:
        """The control tokens in the marks of a format, and those of its calls."""
        key = (form, calls)
        if key not in self._marks:
            thought = form.thought
            marks = [*form.calls.marks] if calls or form.in_channels else []
            marks += [form.text_tags.text_closes] if form.text_tags is not None else []
            if thought is not None:
                marks += [thought.opens, thought.closes, thought.between, *thought.introductions]
            vocabulary = self._vocabulary
            tokens = {token for mark in marks if mark for token in vocabulary.tokenize(mark, control=True)}
            self._marks[key] = frozenset(
                t for t in tokens if vocabulary.is_control(t) and not vocabulary.is_end(t)
            )
        return self._marks[key]

    def _controls(self, syntax: CallSyntax) -> dict[str, int]:
        """The tokens of the marks of calls that are control tokens."""
        vocabulary = self._vocabulary
        found = {mark: vocabulary.tokenize(mark, control=True) for mark in syntax.marks}
        return {
            mark: tokens[0]
            for mark, tokens in found.items()
            if len(tokens) == 1 and vocabulary.is_control(tokens[0])
        }


def _thought(
    form: ThoughtFormat, syntax: CallSyntax | None, config: GenerationConfig, *, opened: bool
) -> Thought:
    calls = syntax is not None and syntax.in_channels
    return Thought(
        opens=form.opens.encode(),
        closes=form.closes.encode(),
        opened=opened,
        budget=config.thinking.budget,
        cut=form.cut(calls=calls),
        between=form.behind(calls=calls),
        must=bool(form.introductions),
    )


def _no_calls(syntax: CallSyntax, tools: Sequence[Tool]) -> ToolCallGrammar:
    """Expect nothing but text, although the prompt shows tools."""
    return ToolCallGrammar(
        trigger=syntax.trigger.encode(),
        steps=(),
        first_only=syntax.first_only,
        other_triggers=tuple((trigger.encode(), ()) for trigger in syntax.more_triggers(tools)),
        prompt_end=_prompt_end(syntax),
        forbidden=True,
    )


def _prompt_end(syntax: CallSyntax) -> bytes:
    """The end of the prompt that may belong to the trigger of a call."""
    return harmony.ASSISTANT.encode() if syntax.in_channels else b""


def _text_opens(syntax: CallSyntax | None) -> str:
    """The header of a text that might be a call instead; empty if there is none."""
    return harmony.FINAL if syntax is not None and syntax.in_channels else ""


def _grammar_steps(calls: ToolCallGrammar | None) -> list[GrammarStep]:
    """The grammars in calls, each once."""
    steps = [] if calls is None else [step for _, steps in calls.triggers for step in steps]
    found = [step for step in steps if isinstance(step, GrammarStep)]
    found += [grammar for step in steps if isinstance(step, ChoiceStep) for _, grammar in step.options]
    return list(dict.fromkeys(found))
