"""Takes an answer apart as it is generated: the thought before it, its text, and the tools that it calls."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgespec.generation.tools import CallPiece, Tool, ToolCall
from edgespec.text.answer_format import ThoughtFormat
from edgespec.text.calls.fenced import FENCE, FencedCall, FenceReader, begins_line
from edgespec.text.calls.reader import CallEnd, CallName, CallReader
from edgespec.text.calls.syntax import CallSyntax

_ID_LENGTH = 9  # what Mistral's templates insist on
_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer that can no longer change: of its thought, its text, or a call."""

    reasoning: str = ""
    text: str = ""
    call: CallPiece | None = None


class PartsReader(ABC):
    """Takes the characters of an answer, and gives its parts as soon as they are certain.

    Args:
        call_id: gives the id of a call by its index.
    """

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._calls: list[tuple[str, str, list[str]]] = []  # ids, names, and pieces of arguments
        self._call_id = call_id
        self._held = ""  # not certain yet
        self._searched = 0  # characters of it in which nothing was found

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the last one may be incomplete."""
        return [ToolCall(identifier, name, "".join(pieces)) for identifier, name, pieces in self._calls]

    @property
    @abstractmethod
    def thinking(self) -> bool:
        """True if the answer is in a thought."""

    def push(self, text: str) -> list[AnswerPart]:
        """Take more characters; returns the parts that have become certain."""
        self._searched = len(self._held)
        self._held += text
        return list(self._parts(final=False))

    def flush(self) -> list[AnswerPart]:
        """End the answer; returns the rest."""
        return list(self._parts(final=True))

    @abstractmethod
    def _parts(self, *, final: bool) -> Iterator[AnswerPart]:
        """The parts that are certain now."""

    def _new_call(self, name: str) -> AnswerPart:
        index = len(self._calls)
        self._calls.append((self._call_id(index), name, []))
        return AnswerPart(call=CallPiece(index, self._calls[index][0], name))

    def _more_arguments(self, said: str) -> AnswerPart:
        self._calls[-1][2].append(said)
        return AnswerPart(call=CallPiece(len(self._calls) - 1, arguments=said))

    def _certain_length(self, marks: Sequence[str]) -> int:
        """Return the length of held text that is certainly no part of a mark or the space before it."""
        end = len(self._held)
        for mark in marks:
            sizes = range(min(len(mark) - 1, len(self._held)), 0, -1)
            size = next((n for n in sizes if mark.startswith(self._held[-n:])), 0)
            end = min(end, len(self._held) - size)
        return len(self._held[:end].rstrip())

    def _release(self, end: int) -> str:
        said, self._held = self._held[:end], self._held[end:]
        return said


class AnswerParts(PartsReader):
    """The parts of an answer whose thought, text and calls are marked one after the other.

    Space around a thought is no part of anything.

    Args:
        thought: how thoughts are marked; None if there are none.
        opened: the prompt has opened one.
        budgeted: a thought may have been closed before its end, so the model may close it again in the text.
        syntax: how tools are called; None if no call is to be recognized.
        tools: those that may be called.
        fences: decides which code fences are calls; None if none is.
        text_closes: the mark that ends the text; only calls may follow. Empty if there is none.
        call_id: as for PartsReader.
    """

    def __init__(
        self,
        thought: ThoughtFormat | None,
        *,
        opened: bool = False,
        budgeted: bool = False,
        text_closes: str = "",
        syntax: CallSyntax | None = None,
        tools: Sequence[Tool] = (),
        fences: FenceReader | None = None,
        call_id: Callable[[int], str] = lambda index: call_id("", index),
    ) -> None:
        super().__init__(call_id)
        self._thought = thought
        self._stray = thought.closes if thought is not None and budgeted else ""  # no part of a text
        self._syntax = syntax
        self._tools = tools
        self._fences = fences
        self._text_closes = text_closes
        self._may_be_call = fences is not None  # the answer as a whole
        self._in_code = False  # in a code fence that is text
        self._found: list[FencedCall] = []  # calls of a fence that are still to be given
        self._call: CallReader | None = None
        self._said = False  # the answer has text
        self._take = self._in_thought if thought and opened else self._at_start if thought else self._in_text

    @property
    def thinking(self) -> bool:
        return self._take == self._in_thought

    def _parts(self, *, final: bool) -> Iterator[AnswerPart]:
        while True:
            before = self._take
            part = self._take(final)
            if part is not None:
                yield part
            if self._take == before and part is None:
                return
            self._searched = 0

    def _at_start(self, final: bool) -> AnswerPart | None:
        assert self._thought is not None
        begun = self._held.lstrip()
        if begun.startswith(self._thought.opens):
            self._held = begun[len(self._thought.opens) :]
            self._take = self._in_thought
        elif begun.startswith(self._thought.closes):  # as some templates show an answer without a thought
            self._held = begun[len(self._thought.closes) :]
            self._take = self._before_text
        elif final or not any(mark.startswith(begun) for mark in (self._thought.opens, self._thought.closes)):
            self._take = self._before_text
        return None

    def _in_thought(self, final: bool) -> AnswerPart | None:
        assert self._thought is not None
        at = self._held.find(self._thought.closes)
        if at >= 0:
            said, self._held = self._held[:at], self._held[at + len(self._thought.closes) :]
            self._take = self._before_text
            said = said.rstrip()
        else:
            said = self._certain(self._thought.closes, final)
            if final:
                said = said.rstrip()
        if not self._said:  # of the thought, here
            said = said.lstrip()
        if not said:
            if self._take == self._before_text:
                self._said = False
            return None
        self._said = self._take == self._in_thought
        return AnswerPart(reasoning=said)

    def _before_text(self, final: bool) -> AnswerPart | None:
        """Between the thought and the answer: space, and marks that introduce the answer."""
        assert self._thought is not None
        begun = self._held.lstrip()
        for mark in self._thought.introductions:
            if begun.startswith(mark):
                self._held = begun[len(mark) :]
                return AnswerPart()
        undecided = not begun or any(mark.startswith(begun) for mark in self._thought.introductions)
        if final or not undecided:
            self._held = begun
            self._said = False
            self._take = self._in_text
        return None

    def _in_text(self, final: bool) -> AnswerPart | None:
        syntax = self._syntax
        if self._stray and self._stray in self._held:
            self._held, self._searched = self._held.replace(self._stray, ""), 0
        if self._text_closes:
            return self._in_closed_text(self._text_closes, final)
        if syntax is None:
            whole = final or not self._stray
            said = self._release(len(self._held) if whole else self._certain_length([self._stray]))
            return AnswerPart(text=said) if said else None
        if syntax.first_only:
            return self._at_first(syntax, final)
        if self._found:
            return self._next_found()
        at = self._held.find(syntax.trigger, max(self._searched - len(syntax.trigger) + 1, 0))
        if self._fences is not None and self._may_be_call:
            calls = () if at >= 0 else self._fences.decide_whole(self._held, final=final)
            if calls is None:
                return None
            self._may_be_call = False
            self._found, self._held = list(calls), "" if calls else self._held
            return AnswerPart()
        if self._fences is not None and (fence := self._next_fence(at)) >= 0:
            return self._at_fence(self._fences, fence, at, final)
        if at >= 0:
            self._in_code = False
            said, self._held = self._held[:at], self._held[at + len(syntax.trigger) :]
            self._begin_call(syntax)
            said = said.rstrip()
        else:
            marks = [syntax.trigger] if self._fences is None else [syntax.trigger, FENCE]
            marks += [self._stray] if self._stray else []
            said = self._release(len(self._held) if final else self._certain_length(marks))
            if final and self._calls:
                said = said.rstrip()
        return self._text(said)

    def _in_closed_text(self, closes: str, final: bool) -> AnswerPart | None:
        """Parse in a text that a mark ends, which the mark of a call may begin with."""
        at = self._held.find(closes)
        if at >= 0:
            said = self._release(at).rstrip()
            self._take = self._behind_text
            return self._text(said) or AnswerPart()
        said = self._release(len(self._held) if final else self._certain_length([closes]))
        return self._text(said)

    def _behind_text(self, final: bool) -> AnswerPart | None:
        """Behind the text: calls, and marks that are no part of anything."""
        syntax = self._syntax
        trigger = syntax.trigger if syntax is not None else self._text_closes
        at = self._held.find(trigger)
        if syntax is not None and at >= 0:
            self._held = self._held[at + len(trigger) :]
            self._begin_call(syntax)
        elif final or syntax is None:
            self._held = ""
        return None

    def _text(self, said: str) -> AnswerPart | None:
        if self._calls and not self._said:  # the space between calls
            said = said.lstrip()
        self._said = self._said or bool(said)
        return AnswerPart(text=said) if said else None

    def _next_fence(self, before: int) -> int:
        """Find where the first code fence begins or ends that is held; -1 if there is none.

        Args:
            before: where it has to be; -1 for anywhere.
        """
        at = -1
        while (at := self._held.find(FENCE, at + 1, before if before >= 0 else None)) >= 0:
            # Space at the end of what was released is held, so that a line begins in what is held, or at
            # the beginning of the text.
            if begins_line(("x" if self._said else "") + self._held[:at]):
                return at
        return -1

    def _at_fence(self, fences: FenceReader, at: int, call_at: int, final: bool) -> AnswerPart | None:
        """Parse at a code fence, before which there may be text.

        Args:
            call_at: where a call begins that is marked as one; -1 if none does.
        """
        if self._in_code:
            self._in_code = False
            return self._text(self._release(at + len(FENCE)))
        # A call that is marked as one is a call wherever it stands, so the fence before it is text.
        held = self._held[at:] if call_at < 0 else self._held[at:call_at]
        fence = fences.decide(held, final=final or call_at >= 0)
        if fence is None:
            return self._text(self._release(len(self._held[:at].rstrip())))
        if not fence.calls:
            self._in_code = fence.is_open
            return self._text(self._release(at + fence.size))
        said = self._release(at).rstrip()
        self._release(fence.size)
        self._found = list(fence.calls)
        return self._text(said) or AnswerPart()

    def _next_found(self) -> AnswerPart:
        """The next call of a fence, as a whole."""
        call = self._found.pop(0)
        index = len(self._calls)
        self._calls.append((self._call_id(index), call.name, [call.arguments]))
        return AnswerPart(call=CallPiece(index, self._calls[index][0], call.name, call.arguments))

    def _at_first(self, syntax: CallSyntax, final: bool) -> AnswerPart | None:
        """Parse at the beginning of an answer that is a call as a whole, or none."""
        begun = self._held.lstrip()
        if not self._said and begun.startswith(syntax.trigger):
            self._held = begun  # the trigger is a part of the call's JSON
            self._begin_call(syntax)
            return None
        if not final and not self._said and syntax.trigger.startswith(begun):
            return None
        said, self._held = self._held, ""
        self._said = self._said or bool(said)
        return AnswerPart(text=said) if said else None

    def _begin_call(self, syntax: CallSyntax) -> None:
        self._call = syntax.reader(self._tools)
        self._take = self._in_call

    def _in_call(self, final: bool) -> AnswerPart | None:
        assert self._call is not None
        read, self._held = self._call.read(self._held)
        if isinstance(read, CallEnd):
            self._call = None
            self._take = self._behind_text if self._text_closes else self._in_text
            return None
        if isinstance(read, CallName):
            return self._new_call(read.name)
        return self._more_arguments(read) if read else None

    def _certain(self, mark: str, final: bool) -> str:
        """Release the text that is certainly no part of a mark or of the space before it."""
        return self._release(len(self._held) if final else self._certain_length([mark]))


def call_id(prompt: str | Sequence[int], index: int) -> str:
    """An id for a call: the same each time the prompt is answered, and another in other conversations."""
    number = int.from_bytes(
        hashlib.blake2b(repr((list(prompt), index)).encode(), digest_size=8).digest(), "big"
    )
    letters = []
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)
