"""Takes answers apart whose messages name their recipients (see `calls.headers`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from edgespec.generation.tools import Tool
from edgespec.text.answer_parts import AnswerPart, PartsReader, call_id
from edgespec.text.calls.headers import Headers
from edgespec.text.calls.reader import CallEnd, CallName, CallReader
from edgespec.text.calls.syntax import CallSyntax

_LONGEST_HEADER = 400  # characters; longer ones are text

_Body = Literal["", "thought", "text", "call", "over"]


class HeaderParts(PartsReader):
    """The parts of an answer that is a row of messages to the user, the model itself and tools.

    Messages to the user are one text, thoughts are one thought, with blank lines in between. What has no
    header is text.

    Args:
        begins: what the prompt has opened: "thought", "text", or nothing.
        syntax: how tools are called; None if no call is to be recognized.
        tools: those that may be called.
        call_id: as for PartsReader.
    """

    def __init__(
        self,
        headers: Headers,
        *,
        begins: Literal["", "thought", "text"] = "",
        syntax: CallSyntax | None = None,
        tools: Sequence[Tool] = (),
        call_id: Callable[[int], str] = lambda index: call_id("", index),
    ) -> None:
        super().__init__(call_id)
        self._headers = headers
        self._syntax = syntax
        self._tools = tools
        self._body: _Body = begins  # empty within a header
        self._begun = False  # the body has something other than space
        self._has: set[_Body] = set()  # what the answer has so far
        self._call: CallReader | None = None
        known = [headers.text, headers.thought, *(tool.name for tool in tools if syntax is not None)]
        self._known = {name: headers.of(name) for name in known if name}
        # A header that is words alone might be text, so only those that are known count.
        self._told_by_marks = bool(headers.marks)
        self._ends = (*headers.ends, *([headers.again] if self._told_by_marks else self._known.values()))
        before, again = re.escape(headers.before.strip()), re.escape(headers.again.strip())
        again = rf"(?:{again}\s*)?" if again else ""
        self._header_of = re.compile(rf"\s*{again}{before}([\w.-]+){re.escape(headers.behind)}", re.ASCII)

    @property
    def thinking(self) -> bool:
        """True if the answer is in a thought."""
        return self._body == "thought"

    def _parts(self, *, final: bool) -> Iterator[AnswerPart]:
        while True:
            before = self._body, self._held
            part = self._header(final) if not self._body else self._of_body(final)
            if part is not None:
                yield part
            if (self._body, self._held) == before:
                return

    def _header(self, final: bool) -> AnswerPart | None:
        """Read the header of a message; sets the body to what follows it, unless more is needed."""
        found = self._header_of.match(self._held)
        recipient = found[1] if found is not None else ""
        if found is not None and (self._told_by_marks or recipient in self._known):
            rest = self._held[found.end() :]
            if recipient == self._headers.thought:
                self._enter("thought", rest)
            elif self._syntax is not None and recipient in self._known and recipient != self._headers.text:
                return self._begin_call(self._syntax, recipient, rest)
            else:
                self._enter("text", rest)
        elif final or not self._may_be_header():
            self._body, self._begun = "text", not self._has  # space at the beginning may be the text's
        return None

    def _may_be_header(self) -> bool:
        held = self._held.lstrip()
        if not held:
            return True
        starts = [
            start for name, header in self._known.items() for start in (header, self._headers.first(name))
        ]
        if any(start.lstrip().startswith(held) for start in starts):
            return True
        begins = (self._headers.again, self._headers.before.strip())
        return (
            self._told_by_marks
            and len(held) < _LONGEST_HEADER
            and self._headers.behind not in held
            and any(begin and held.startswith(begin) for begin in begins)
        )

    def _enter(self, body: _Body, held: str) -> None:
        self._body, self._held, self._begun = body, held, False

    def _begin_call(self, syntax: CallSyntax, name: str, rest: str) -> AnswerPart | None:
        self._call = syntax.reader(self._tools)
        self._enter("call", rest if syntax.names_again else name + self._headers.behind + rest)
        return None

    def _of_body(self, final: bool) -> AnswerPart | None:
        if self._body == "call":
            return self._in_call()
        found = [at for at in map(self._held.find, self._ends) if at >= 0]
        body = self._body
        if found:
            said, self._held = self._held[: min(found)].rstrip(), self._held[min(found) :]
            mark = next((mark for mark in self._headers.ends if self._held.startswith(mark)), "")
            self._held = self._held.removeprefix(mark)
            self._body = ""
        elif final:
            said = self._release(len(self._held.rstrip() if body == "thought" else self._held))
        else:
            said = self._release(self._certain_length(self._ends))
        if not self._begun:
            said = said.lstrip()
        if not said or body == "over":
            return None
        between = "\n\n" if not self._begun and body in self._has else ""
        self._begun = True
        self._has.add(body)
        return AnswerPart(reasoning=between + said) if body == "thought" else AnswerPart(text=between + said)

    def _in_call(self) -> AnswerPart | None:
        assert self._call is not None
        read, self._held = self._call.read(self._held)
        if isinstance(read, CallEnd):
            self._enter("over", self._held)
            return None
        if isinstance(read, CallName):
            return self._new_call(read.name)
        return self._more_arguments(read) if read else None
