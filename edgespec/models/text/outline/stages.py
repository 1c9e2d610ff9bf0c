"""The positions in an outline, and how tokens lead from one to the next; see `outline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.models.text.outline.pieces import Pieces
from edgespec.models.text.outline.steps import Calls, Step, Thought
from edgespec.speculation.constraint import Matcher

BoolArray = NDArray[np.bool_]


class Stage(Protocol):
    """A position in an outline. Immutable, but for the matcher of a form."""

    @property
    def accepting(self) -> bool:
        """True if the answer may end here."""
        return False

    def mask(self) -> BoolArray | None:
        """(n_vocab,) which tokens may follow; None permits all."""

    def after(self, token: int) -> Stage | None:
        """The position after a token; None if it may not follow."""

    def undo(self) -> None:
        """Take back what `after` has changed; nothing, at most positions."""
        return


class Frame(Protocol):
    """The outline that a stage belongs to; see `outline.Outline`."""

    pieces: Pieces
    calls: Calls | None

    @property
    def bound(self) -> bool: ...
    def answer(self, data: bytes = b"") -> Stage | None: ...
    def call(self, steps: Sequence[Step], data: bytes) -> Stage | None: ...
    def follow(self, steps: Sequence[Step], data: bytes) -> Stage | None: ...
    def literal(self, text: str, data: bytes, then: Callable[[bytes], Stage | None]) -> Stage | None: ...


@dataclass(frozen=True)
class Start(Stage):
    """The stage before an answer that may begin with a thought."""

    outline: Frame
    thought: Thought
    tail: bytes
    read: tuple[int, ...]

    @property
    def accepting(self) -> bool:
        return not self.outline.bound

    def mask(self) -> BoolArray | None:
        outline = self.outline
        if not outline.bound:
            return None
        opening = outline.pieces.towards(self.thought.opens[len(self.tail) :])
        if self.tail or self.thought.must:
            return opening
        answer = outline.answer()
        assert answer is not None, "nothing was read yet"
        permitted = answer.mask()
        return opening if permitted is None else opening | permitted

    def after(self, token: int) -> Stage | None:
        outline, opens = self.outline, self.thought.opens
        tail = self.tail + outline.pieces[token]
        begun = tail if outline.bound else tail.lstrip()
        if begun.startswith(opens):
            return thinking(outline, self.thought, begun[len(opens) :], 0)
        if opens.startswith(begun):
            return replace(self, tail=tail, read=(*self.read, token))
        if outline.bound and self.thought.must:
            return None
        answer = outline.answer()
        for read in (*self.read, token):
            answer = None if answer is None else answer.after(read)
        return answer


def thinking(outline: Frame, thought: Thought, tail: bytes, count: int) -> Stage | None:
    """The position in a thought after `count` tokens of it, the latest of which spell `tail`."""
    at = tail.find(thought.closes)
    if at >= 0:
        data = tail[at + len(thought.closes) :]
        if not outline.bound:
            return outline.answer(data)
        between = thought.between.encode()
        if between.startswith(data):
            return outline.literal(thought.between, data, outline.answer)
        return outline.answer(data.lstrip())
    if thought.budget is not None and count >= thought.budget:
        return outline.literal(thought.cut, b"", outline.answer)
    return Thinking(outline, thought, tail[-(len(thought.closes) - 1) :], count)


@dataclass(frozen=True)
class Thinking(Stage):
    """The stage within a thought."""

    outline: Frame
    thought: Thought
    tail: bytes
    count: int

    @property
    def accepting(self) -> bool:
        return not self.outline.bound

    def mask(self) -> BoolArray | None:
        if not self.outline.bound:
            return None
        return self.outline.pieces.unless(
            self.tail, self.thought.closes, lambda rest: not rest.strip() or self._fits(rest)
        )

    def after(self, token: int) -> Stage | None:
        tail = self.tail + self.outline.pieces[token]
        return thinking(self.outline, self.thought, tail, self.count + 1)

    def _fits(self, rest: bytes) -> bool:
        return self.outline.answer(rest.lstrip()) is not None


@dataclass(frozen=True)
class Literal(Stage):
    """The stage within a fixed text.

    Attributes:
        tokens: those that are still to come.
        then: gives the position behind it.
    """

    outline: Frame
    tokens: tuple[int, ...]
    then: Callable[[], Stage | None]

    def mask(self) -> BoolArray | None:
        return self.outline.pieces.only(self.tokens[:1])

    def after(self, token: int) -> Stage | None:
        if token != self.tokens[0]:
            return None
        if len(self.tokens) > 1:
            return replace(self, tokens=self.tokens[1:])
        return self.then()


@dataclass(frozen=True)
class Choosing(Stage):
    """The stage within one of several fixed texts.

    Attributes:
        options: the tokens of each that are still to come, and the steps after it.
    """

    outline: Frame
    options: Sequence[tuple[tuple[int, ...], tuple[Step, ...]]]

    def mask(self) -> BoolArray | None:
        return self.outline.pieces.only([tokens[0] for tokens, _ in self.options])

    def after(self, token: int) -> Stage | None:
        left = [(tokens[1:], rest) for tokens, rest in self.options if tokens[0] == token]
        if not left:
            return None
        # No option is the beginning of another one: all end with the same mark.
        if not left[0][0]:
            return self.outline.follow(left[0][1], b"")
        return replace(self, options=left)


@dataclass(frozen=True)
class Free(Stage):
    """The stage within free text.

    Attributes:
        tail: the latest bytes, which may be the beginning of a trigger.
        at_start: nothing but space was read yet, apart from `tail`.
    """

    outline: Frame
    tail: bytes
    at_start: bool

    accepting = True

    def mask(self) -> BoolArray | None:
        calls = self.outline.calls
        if calls is None or (calls.first_only and not self.at_start):
            return None
        permitted: BoolArray | None = None
        for trigger, steps in calls.triggers:
            mask = self.outline.pieces.unless(self.tail, trigger, partial(self._fits, steps))
            if mask is not None:
                permitted = mask if permitted is None else permitted & mask
        return permitted

    def after(self, token: int) -> Stage | None:
        return self.with_data(self.outline.pieces[token])

    def _fits(self, steps: Sequence[Step], rest: bytes) -> bool:
        return self.outline.call(steps, rest) is not None

    def with_data(self, data: bytes) -> Stage:
        """The position after more bytes; a trigger whose continuation does not fit is text like any other."""
        calls = self.outline.calls
        if calls is None or (calls.first_only and not self.at_start):
            return self
        text = (self.tail + data).lstrip() if calls.first_only else self.tail + data
        for trigger, steps in calls.triggers:
            at = text.find(trigger)
            if at == 0 or (at > 0 and not calls.first_only):
                call = self.outline.call(steps, text[at + len(trigger) :])
                if call is not None:
                    return call
        if calls.first_only:
            return replace(self, tail=text, at_start=calls.trigger.startswith(text))
        longest = max(len(trigger) for trigger, _ in calls.triggers)
        return replace(self, tail=text[-(longest - 1) :])


@dataclass(frozen=True)
class InForm:
    """The stage within a form.

    Attributes:
        rest: the steps after it.
        delimited: it is over as soon as it may be, because nothing can follow JSON that is closed.
    """

    outline: Frame
    form: Matcher
    rest: tuple[Step, ...]
    delimited: bool

    @property
    def accepting(self) -> bool:
        return not self.delimited and self.form.is_accepting()

    def mask(self) -> BoolArray | None:
        mask: Any = np.frombuffer(self.form.compute_logit_bias(), dtype=np.uint8)
        return self.outline.pieces.fitted(mask != 0)

    def after(self, token: int) -> Stage | None:
        if self.form.try_consume_tokens([token]) < 1:
            return None
        if self.delimited and self.form.is_accepting():
            return self.outline.follow(self.rest, b"")
        return self

    def undo(self) -> None:
        self.form.rollback(1)


@dataclass(frozen=True)
class Over(Stage):
    """The stage after all that was required; nothing but the end may follow."""

    outline: Frame

    accepting = True

    def mask(self) -> BoolArray | None:
        return self.outline.pieces.only([])

    def after(self, token: int) -> Stage | None:
        return None
