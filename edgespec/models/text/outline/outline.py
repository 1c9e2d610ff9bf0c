"""The outline of an answer: a thought with a budget, then free text, tool calls, or a form.

An `Outline` says which tokens may follow, as a grammar's matcher does (`speculation.constraint.Matcher`), so
trees are drafted and verified under it in the same way. What may follow depends on the tokens of the answer
alone. So whatever the drafter or the tree, the text is that of plain decoding under the same outline.

Free text is not restricted, but for the tokens that would complete a mark and run on in a way that the form
behind it does not permit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.models.text.outline.pieces import Pieces
from edgespec.models.text.outline.stages import (
    Choosing,
    Free,
    InForm,
    Literal,
    Over,
    Stage,
    Start,
    thinking,
)
from edgespec.models.text.outline.steps import Calls, Fixed, Form, Step, Thought
from edgespec.speculation.constraint import Matcher


class Outline:
    """A position in the outline of an answer: a `speculation.constraint.Matcher`.

    Args:
        pieces: what tokens spell.
        tokenize: the tokens of a text in which marks are marks.
        matcher: gives the matcher of a form, at its beginning.
        whole: gives the matcher of the form of the whole answer, at its beginning; None for free text.
        calls: the tools that it may call; not together with `whole`.
    """

    def __init__(
        self,
        pieces: Pieces,
        tokenize: Callable[[str], list[int]],
        matcher: Callable[[Form], Matcher],
        *,
        thought: Thought | None = None,
        calls: Calls | None = None,
        whole: Callable[[], Matcher] | None = None,
    ) -> None:
        self.pieces = pieces
        self.tokenize = tokenize
        self.matcher = matcher
        self.thought = thought
        self.calls = calls
        self.whole = whole
        self._all = np.ones(pieces.n_tokens, dtype=np.uint8).tobytes()
        self._stages: list[Stage] = [self._first()]

    def deep_copy(self) -> Outline:
        """Return the outline at its beginning."""
        return Outline(
            self.pieces,
            self.tokenize,
            self.matcher,
            thought=self.thought,
            calls=self.calls,
            whole=self.whole,
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

    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        return self._stages[-1].accepting

    def get_error(self) -> str:
        """Return the part that a form cannot cope with; empty if nothing is wrong."""
        stage = self._stages[-1]
        return stage.form.get_error() if isinstance(stage, InForm) else ""

    @property
    def bound(self) -> bool:
        """True if something is required of the answer after its thought."""
        return self.whole is not None or (self.calls is not None and self.calls.required)

    def answer(self, data: bytes = b"") -> Stage | None:
        """The position at the beginning of the answer proper, after bytes of it; None if they do not fit."""
        if self.whole is not None:
            return self._in_form(self.whole(), (), data)
        if self.calls is not None and self.calls.required:
            steps = self.calls.steps
            return self.literal(self.calls.trigger.decode(), data, lambda rest: self.call(steps, rest))
        before = self.calls.before if self.calls is not None else b""
        return Free(self, before, at_start=True).with_data(data)

    def call(self, steps: Sequence[Step], data: bytes) -> Stage | None:
        """The position within a call, after its trigger and these bytes; None if they do not fit.

        Args:
            steps: those behind the trigger.
        """
        assert self.calls is not None
        if self.calls.forbidden:
            return None
        return self.follow(steps, (self.calls.trigger if self.calls.fed else b"") + data)

    def follow(self, steps: Sequence[Step], data: bytes) -> Stage | None:
        """The position at the beginning of these steps, after bytes of them; None if they do not fit."""
        if not steps:
            if self.calls is not None and self.calls.repeats:
                return Free(self, b"", at_start=False).with_data(data)
            return None if data.strip() else Over(self)
        step, rest = steps[0], tuple(steps[1:])
        if isinstance(step, Fixed):
            return self.literal(step.text, data, lambda more: self.follow(rest, more))
        if isinstance(step, Form):
            return self._in_form(self.matcher(step), rest, data, delimited=True)
        said = data.decode("utf-8", "replace")
        options = [
            (tuple(self.tokenize(fixed.text[len(said) :])), (form, *rest))
            for fixed, form in step.options
            if fixed.text.startswith(said) and len(said) < len(fixed.text)
        ]
        return Choosing(self, options) if options else None

    def literal(self, text: str, data: bytes, then: Callable[[bytes], Stage | None]) -> Stage | None:
        """The position in a fixed text, after bytes of it and perhaps of what follows.

        Args:
            then: gives the position behind it, after bytes of that.
        """
        fixed = text.encode()
        if data.startswith(fixed):
            return then(data[len(fixed) :])
        if not fixed.startswith(data):
            return None
        return Literal(self, tuple(self.tokenize(fixed[len(data) :].decode())), lambda: then(b""))

    def _in_form(
        self, form: Matcher, rest: tuple[Step, ...], data: bytes, *, delimited: bool = False
    ) -> Stage | None:
        if data:
            tokens = self.tokenize(data.decode("utf-8", "replace"))
            if form.try_consume_tokens(tokens) < len(tokens):
                return None
        return InForm(self, form, rest, delimited=delimited)

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
