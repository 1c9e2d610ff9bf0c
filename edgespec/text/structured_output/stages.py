"""The stages of a structured answer, and how tokens lead from one to the next; see `answer_matcher`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.constraint import Matcher
from edgespec.text.structured_output.steps import Step, Thought, ToolCallGrammar
from edgespec.text.structured_output.token_bytes import TokenBytes

BoolArray = NDArray[np.bool_]

MAX_SPACE = 4  # bytes between calls


class Stage(Protocol):
    """A stage of an answer. Immutable, except for the matcher of a grammar."""

    @property
    def accepting(self) -> bool:
        """True if the answer may end here."""
        return False

    def mask(self) -> BoolArray | None:
        """(n_vocab,) which tokens may follow; None permits all."""

    def forced(self) -> Sequence[int]:
        """Tokens that spell the only text that may follow, as far as it is certain; none at most stages."""
        return ()

    def after(self, token: int) -> Stage | None:
        """The stage after a token; None if it may not follow."""

    def undo(self) -> None:
        """Take back what `after` has changed; nothing, at most stages."""
        return


class StageContext(Protocol):
    """The matcher that a stage belongs to; see `answer_matcher.AnswerMatcher`."""

    token_bytes: TokenBytes
    calls: ToolCallGrammar | None

    @property
    def bound(self) -> bool: ...
    def answer(self, data: bytes = b"") -> Stage | None: ...
    def call(self, steps: Sequence[Step], data: bytes) -> Stage | None: ...
    def follow(self, steps: Sequence[Step], data: bytes) -> Stage | None: ...
    def literal(self, text: str, data: bytes, then: Callable[[bytes], Stage | None]) -> Stage | None: ...


@dataclass(frozen=True)
class Start(Stage):
    """The stage before an answer that may begin with a thought."""

    context: StageContext
    thought: Thought
    tail: bytes
    read: tuple[int, ...]

    @property
    def accepting(self) -> bool:
        return not self.context.bound

    def mask(self) -> BoolArray | None:
        context = self.context
        if not context.bound:
            return None
        opening = context.token_bytes.towards(self.thought.opens[len(self.tail) :])
        if self.tail or self.thought.must:
            return opening
        answer = context.answer()
        assert answer is not None, "nothing was read yet"
        permitted = answer.mask()
        return opening if permitted is None else opening | permitted

    def after(self, token: int) -> Stage | None:
        context, opens = self.context, self.thought.opens
        tail = self.tail + context.token_bytes[token]
        begun = tail if context.bound else tail.lstrip()
        if begun.startswith(opens):
            return thinking(context, self.thought, begun[len(opens) :], 0)
        if opens.startswith(begun):
            return replace(self, tail=tail, read=(*self.read, token))
        if context.bound and self.thought.must:
            return None
        answer = context.answer()
        for read in (*self.read, token):
            answer = None if answer is None else answer.after(read)
        return answer


def thinking(context: StageContext, thought: Thought, tail: bytes, count: int) -> Stage | None:
    """The stage in a thought after `count` tokens of it, the latest of which spell `tail`."""
    at = tail.find(thought.closes)
    if at >= 0:
        data = tail[at + len(thought.closes) :]
        if not context.bound:
            return context.answer(data)
        between = thought.between.encode()
        if between.startswith(data):
            return context.literal(thought.between, data, context.answer)
        return context.answer(data.lstrip())
    if thought.budget is not None and count >= thought.budget:
        return context.literal(thought.cut, b"", context.answer)
    return Thinking(context, thought, tail[-(len(thought.closes) - 1) :], count)


@dataclass(frozen=True)
class Thinking(Stage):
    """The stage within a thought."""

    context: StageContext
    thought: Thought
    tail: bytes
    count: int

    @property
    def accepting(self) -> bool:
        return not self.context.bound

    def mask(self) -> BoolArray | None:
        if not self.context.bound:
            return None
        return self.context.token_bytes.unless(
            self.tail, self.thought.closes, lambda rest: not rest.strip() or self._fits(rest)
        )

    def after(self, token: int) -> Stage | None:
        tail = self.tail + self.context.token_bytes[token]
        return thinking(self.context, self.thought, tail, self.count + 1)

    def _fits(self, rest: bytes) -> bool:
        return self.context.answer(rest.lstrip()) is not None


@dataclass(frozen=True)
class Literal(Stage):
    """The stage within a fixed text."""

    context: StageContext
    tokens: tuple[int, ...]  # those that are still to come
    then: Callable[[], Stage | None]  # gives the stage behind it

    def mask(self) -> BoolArray | None:
        return self.context.token_bytes.only(self.tokens[:1])

    def forced(self) -> Sequence[int]:
        return self.tokens

    def after(self, token: int) -> Stage | None:
        if token != self.tokens[0]:
            return None
        if len(self.tokens) > 1:
            return replace(self, tokens=self.tokens[1:])
        return self.then()


@dataclass(frozen=True)
class Choosing(Stage):
    """The stage within one of several fixed texts."""

    context: StageContext
    # the tokens of each that are still to come, and the steps after it
    options: Sequence[tuple[tuple[int, ...], tuple[Step, ...]]]

    def mask(self) -> BoolArray | None:
        return self.context.token_bytes.only([tokens[0] for tokens, _ in self.options])

    def after(self, token: int) -> Stage | None:
        left = [(tokens[1:], rest) for tokens, rest in self.options if tokens[0] == token]
        if not left:
            return None
        # No option is the beginning of another one: all end with the same mark.
        if not left[0][0]:
            return self.context.follow(left[0][1], b"")
        return replace(self, options=left)


@dataclass(frozen=True)
class FreeText(Stage):
    context: StageContext
    tail: bytes  # the latest bytes, which may be the beginning of a trigger
    at_start: bool  # nothing but space was read yet, apart from `tail`

    accepting = True

    def mask(self) -> BoolArray | None:
        calls = self.context.calls
        if calls is None or (calls.first_only and not self.at_start):
            return None
        permitted: BoolArray | None = None
        for trigger, steps in calls.triggers:
            mask = self.context.token_bytes.unless(self.tail, trigger, partial(self._fits, steps))
            if mask is not None:
                permitted = mask if permitted is None else permitted & mask
        return permitted

    def after(self, token: int) -> Stage | None:
        return self.with_data(self.context.token_bytes[token])

    def _fits(self, steps: Sequence[Step], rest: bytes) -> bool:
        return self.context.call(steps, rest) is not None

    def with_data(self, data: bytes) -> Stage:
        """The stage after more bytes; a trigger whose continuation does not fit is text like any other."""
        calls = self.context.calls
        if calls is None or (calls.first_only and not self.at_start):
            return self
        text = (self.tail + data).lstrip() if calls.first_only else self.tail + data
        for trigger, steps in calls.triggers:
            at = text.find(trigger)
            if at == 0 or (at > 0 and not calls.first_only):
                call = self.context.call(steps, text[at + len(trigger) :])
                if call is not None:
                    return call
        if calls.first_only:
            return replace(self, tail=text, at_start=calls.trigger.startswith(text))
        longest = max(len(trigger) for trigger, _ in calls.triggers)
        return replace(self, tail=text[-(longest - 1) :])


@dataclass(frozen=True)
class InGrammar:
    """The stage within a schema or grammar."""

    context: StageContext
    matcher: Matcher
    rest: tuple[Step, ...]  # the steps after it
    delimited: bool  # it is over as soon as it may be, because nothing can follow JSON that is closed

    @property
    def accepting(self) -> bool:
        return not self.delimited and self.matcher.is_accepting()

    def mask(self) -> BoolArray | None:
        mask: Any = np.frombuffer(self.matcher.compute_logit_bias(), dtype=np.uint8)
        return self.context.token_bytes.fitted(mask != 0)

    def forced(self) -> Sequence[int]:
        return self.matcher.compute_ff_tokens()

    def after(self, token: int) -> Stage | None:
        if self.matcher.try_consume_tokens([token]) < 1:
            return None
        if self.delimited and self.matcher.is_accepting():
            return self.context.follow(self.rest, b"")
        return self

    def undo(self) -> None:
        self.matcher.rollback(1)


@dataclass(frozen=True)
class BehindCall(Stage):
    """The stage behind a call in an answer that may only be calls: the end or another call follows."""

    context: StageContext
    begins: tuple[int, ...]  # the tokens of what the next call begins with
    call: Callable[[], Stage | None]  # gives the stage behind these
    space: int  # most bytes of space before it, so that a model cannot write space without end

    accepting = True

    def mask(self) -> BoolArray | None:
        token_bytes = self.context.token_bytes
        return token_bytes.space(self.space) | token_bytes.only(self.begins[:1])

    def after(self, token: int) -> Stage | None:
        if token == self.begins[0]:
            return Literal(self.context, self.begins, self.call).after(token)
        piece = self.context.token_bytes[token]
        if not piece or piece.strip() or len(piece) > self.space:
            return None
        return replace(self, space=self.space - len(piece))


@dataclass
class Either(Stage):
    """The stage at the beginning of an answer that may be one thing or another, until only one fits."""

    first: Stage
    second: Stage
    taken: tuple[bool, bool] = (False, False)  # which of the two the latest token has fit

    @property
    def accepting(self) -> bool:
        return self.first.accepting or self.second.accepting

    def mask(self) -> BoolArray | None:
        first, second = self.first.mask(), self.second.mask()
        return None if first is None or second is None else first | second

    def after(self, token: int) -> Stage | None:
        first, second = self.first.after(token), self.second.after(token)
        self.taken = first is not None, second is not None
        return Either(first, second) if first is not None and second is not None else first or second

    def undo(self) -> None:
        for stage, taken in zip((self.first, self.second), self.taken, strict=True):
            if taken:
                stage.undo()


@dataclass(frozen=True)
class Finished(Stage):
    """The stage after all that was required; nothing but the end may follow."""

    context: StageContext

    accepting = True

    def mask(self) -> BoolArray | None:
        return self.context.token_bytes.only([])

    def after(self, token: int) -> Stage | None:
        return None
