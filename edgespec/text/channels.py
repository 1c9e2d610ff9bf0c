"""Takes answers in channels apart (the Harmony format of gpt-oss; see `calls.harmony`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from edgespec.text.answer_parts import AnswerPart, PartsReader, call_id
from edgespec.text.calls import harmony

_HEADS = (harmony.CHANNEL, harmony.START, "to=functions.")
_ENDS = (harmony.END, harmony.CALL, harmony.RETURN, harmony.START)
_LONGEST_HEADER = 400  # characters; longer ones are text
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)", re.ASCII)
_CHANNEL = re.compile(re.escape(harmony.CHANNEL) + r"\s*(\w+)", re.ASCII)

_Body = Literal["", "thought", "text", "call"]


class ChannelParts(PartsReader):
    """The parts of an answer that is a row of messages, each with a header.

    Messages to the user are one text, thoughts are one
    thought, with blank lines in between. What has no header is text.

    Args:
        opened: the prompt has opened a thought.
        calls_tools: whether calls are to be recognized.
        call_id: as for PartsReader.
    """

    def __init__(
        self,
        *,
        opened: bool = False,
        calls_tools: bool = False,
        call_id: Callable[[int], str] = lambda index: call_id("", index),
    ) -> None:
        super().__init__(call_id)
        self._calls_tools = calls_tools
        self._body: _Body = "thought" if opened else ""  # empty within a header
        self._begun = False  # the body has something other than space
        self._has: set[_Body] = set()  # what the answer has so far

    @property
    def thinking(self) -> bool:
        """True if the answer is in a thought."""
        return self._body == "thought"

    def _parts(self, *, final: bool) -> Iterator[AnswerPart]:
        while True:
            if not self._body:
                part = self._header(final)
                if part is not None:
                    yield part
                if not self._body:
                    return
            part = self._of_body(final)
            if part is not None:
                yield part
            if self._body:
                return

    def _header(self, final: bool) -> AnswerPart | None:
        """Read the header of a message; sets the body to what follows it, unless more is needed."""
        begun = self._held.lstrip()
        if not any(begun.startswith(head) or head.startswith(begun) for head in _HEADS):
            self._enter("text", begun)
            return None
        at = begun.find(harmony.MESSAGE)
        if at < 0:
            known = any(begun.startswith(head) for head in _HEADS)
            if len(begun) > _LONGEST_HEADER or (final and begun and not known):
                self._enter("text", begun)
            return None
        header, rest = begun[:at], begun[at + len(harmony.MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self._calls_tools:
            self._enter("call", rest)
            return self._new_call(recipient[1])
        self._enter("thought" if channel is not None and channel[1] == "analysis" else "text", rest)
        return None

    def _enter(self, body: _Body, held: str) -> None:
        self._body, self._held, self._begun = body, held, False

    def _of_body(self, final: bool) -> AnswerPart | None:
        body = self._body
        found = [at for at in map(self._held.find, _ENDS) if at >= 0]
        if found:
            at = min(found)
            said, self._held = self._held[:at].rstrip(), self._held[at:]
            mark = next(mark for mark in _ENDS if self._held.startswith(mark))
            self._held = self._held.removeprefix("" if mark == harmony.START else mark)
            self._body = ""
        else:
            said = self._certain(final)
        if not self._begun:
            said = said.lstrip()
        if not said:
            return None
        between = "\n\n" if not self._begun and body in self._has and body != "call" else ""
        self._begun = True
        self._has.add(body)
        if body == "thought":
            return AnswerPart(reasoning=between + said)
        if body == "text":
            return AnswerPart(text=between + said)
        return self._more_arguments(said)

    def _certain(self, final: bool) -> str:
        """Release the text that is certainly no part of a mark or of the space before it."""
        if not final:
            return self._release(self._certain_length(_ENDS))
        return self._release(len(self._held.rstrip() if self._body == "thought" else self._held))
