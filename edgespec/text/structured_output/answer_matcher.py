"""The structure of an answer: a thought with a budget, then free text, tool calls, or a grammar.

An `AnswerMatcher` says which tokens may follow, as a grammar's matcher does
(`speculation.constraint.Matcher`), so trees are drafted and verified under it in the same way. What may
follow depends on the tokens of the answer alone. So whatever the drafter or the tree, the text is that of
plain decoding under the same matcher.

Free text is not restricted, except for the tokens that would complete a mark and run on in a way that the
grammar behind it does not permit. Where calls are required, no text may follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.speculation.constraint import Matcher
from edgespec.text.structured_output.stages import (
    MAX_SPACE,
    BehindCall,
    Choosing,
    Either,
    Finished,
    FreeText,
    InGrammar,
    Literal,
    Stage,
    Start,
    thinking,
)
from edgespec.text.structured_output.steps import (
    GrammarStep,
    Step,
    Thought,
    ToolCallGrammar,
)
from edgespec.text.structured_output.token_bytes import TokenBytes


class AnswerMatcher:
    """A position in an answer of this structure: a `speculation.constraint.Matcher`.

    Args:
        token_bytes: what tokens spell.
        tokenize: the tokens of a text in which marks are marks.
        matcher_for: gives the matcher of a grammar, at its beginning.
        whole: gives the matcher of the grammar of the whole answer, at its beginning; None for free text.
        calls: the tools that it may call; with `whole`, the answer is either calls or of that grammar.
        whole_opens: the text before the grammar of an answer that might be a call instead.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        tokenize: Callable[[str], list[int]],
        matcher_for: Callable[[GrammarStep], Matcher],
        *,
        thought: Thought | None = None,
        calls: ToolCallGrammar | None = None,
        whole: Callable[[], Matcher] | None = None,
        whole_opens: str = "",
    ) -> None:
        self.token_bytes = token_bytes
        self.tokenize = tokenize
        self.matcher_for = matcher_for
        self.thought = thought
        self.calls = calls
        self.whole = whole
        self.whole_opens = whole_opens
        self._all = np.ones(token_bytes.n_tokens, dtype=np.uint8).tobytes()
        self._stages: list[Stage] = [self._first()]

    def deep_copy(self) -> AnswerMatcher:
        """Return the matcher at its beginning."""
        return AnswerMatcher(
            self.token_bytes,
            self.tokenize,
            self.matcher_for,
            thought=self.thought,
            calls=self.calls,
            whole=self.whole,
            whole_opens=self.whole_opens,
        )

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Take tokens as far as they may follow; returns how many."""
        for taken, token in enumerate(tokens):
            stage = self._stages[-1].after(token)
            if stage is None:
                return taken
            self._stages.append(stage)
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        """Take back the latest tokens."""
        for _ in range(num_tokens):
            self._stages.pop()
            self._stages[-1].undo()
        return True

    def compute_logit_bias(self) -> bytes:
        """Compute a byte for each token, which is 0 unless the token may follow."""
        mask = self._stages[-1].mask()
        return self._all if mask is None else mask.astype(np.uint8).tobytes()

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens of the only text that may follow, as far as it is certain."""
        return list(self._stages[-1].forced())

    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        return self._stages[-1].accepting

    def get_error(self) -> str:
        """Return the part that a grammar cannot cope with; empty if nothing is wrong."""
        stages, last = [], self._stages[-1]
        while isinstance(last, Either):
            stages.append(last.second)
            last = last.first
        errors = (s.matcher.get_error() for s in (last, *stages) if isinstance(s, InGrammar))
        return next(filter(None, errors), "")

    @property
    def bound(self) -> bool:
        """True if something is required of the answer after its thought."""
        return self.whole is not None or (self.calls is not None and self.calls.required)

    def answer(self, data: bytes = b"") -> Stage | None:
        """The stage at the beginning of the answer proper, after bytes of it; None if they do not fit."""
        calls, whole = self.calls, self.whole
        if calls is not None and (calls.required or whole is not None):
            trigger = calls.trigger.removeprefix(calls.prompt_end).decode()
            called = self.literal(trigger, data, lambda rest: self.call(calls.steps, rest))
            if calls.required or whole is None:
                return called
            form = self.literal(self.whole_opens, data, lambda rest: self._in_grammar(whole(), (), rest))
            return Either(called, form) if called is not None and form is not None else called or form
        if whole is not None:
            return self._in_grammar(whole(), (), data)
        prompt_end = self.calls.prompt_end if self.calls is not None else b""
        return FreeText(self, prompt_end, at_start=True).with_data(data)

    def call(self, steps: Sequence[Step], data: bytes) -> Stage | None:
        """The stage within a call, after its trigger and these bytes; None if they do not fit.

        Args:
            steps: those behind the trigger.
        """
        assert self.calls is not None
        if self.calls.forbidden:
            return None
        return self.follow(steps, (self.calls.trigger if self.calls.trigger_in_grammar else b"") + data)

    def follow(self, steps: Sequence[Step], data: bytes) -> Stage | None:
        """The stage at the beginning of these steps, after bytes of them; None if they do not fit."""
        if not steps:
            if self.calls is not None and self.calls.repeats:
                return self._behind_call(self.calls, data)
            return None if data.strip() else Finished(self)
        step, rest = steps[0], tuple(steps[1:])
        if isinstance(step, GrammarStep):
            return self._in_grammar(self.matcher_for(step), rest, data, delimited=not step.open_ended)
        said = data.decode("utf-8", "replace")
        options = [
            (tuple(self.tokenize(fixed[len(said) :])), (grammar, *rest))
            for fixed, grammar in step.options
            if fixed.startswith(said) and len(said) < len(fixed)
        ]
        return Choosing(self, options) if options else None

    def _behind_call(self, calls: ToolCallGrammar, data: bytes) -> Stage | None:
        """The stage behind a call that others may follow, after these bytes; None if they do not fit."""
        if not self.bound:
            return FreeText(self, b"", at_start=False).with_data(data)
        next_call = data.lstrip()
        space = MAX_SPACE - (len(data) - len(next_call))
        if space < 0:
            return None
        trigger = calls.trigger.decode()
        if next_call:
            return self.literal(trigger, next_call, lambda rest: self.call(calls.steps, rest))
        begins = self.tokenize(trigger)
        return BehindCall(self, tuple(begins), lambda: self.call(calls.steps, b""), space)

    def literal(self, text: str, data: bytes, then: Callable[[bytes], Stage | None]) -> Stage | None:
        """The stage in a fixed text, after bytes of it and perhaps of what follows.

        Args:
            then: gives the stage behind it, after bytes of that.
        """
        fixed = text.encode()
        if data.startswith(fixed):
            return then(data[len(fixed) :])
        if not fixed.startswith(data):
            return None
        return Literal(self, tuple(self.tokenize(fixed[len(data) :].decode())), lambda: then(b""))

    def _in_grammar(
        self, matcher: Matcher, rest: tuple[Step, ...], data: bytes, *, delimited: bool = False
    ) -> Stage | None:
        if data:
            tokens = self.tokenize(data.decode("utf-8", "replace"))
            if matcher.try_consume_tokens(tokens) < len(tokens):
                return None
        return InGrammar(self, matcher, rest, delimited=delimited)

    def _first(self) -> Stage:
        thought = self.thought
        if thought is None:
            first = self.answer()
        elif thought.opened:
            first = thinking(self, thought, b"", 0)
        else:
            first = Start(self, thought, b"", ())
        assert first is not None, "nothing was read yet"
        return first
