"""Calls that are written as JSON in a code fence or alone, instead of between the marks of the template.

Qwen2.5-Coder is known for it:

    ```json
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    ```

A fence is a call only if all of its JSON is calls of tools that were declared, and so is an answer that is
nothing but such JSON. Most others are told apart by their first characters; until
then, nothing of them is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.tools import Tool
from edgespec.text.calls.reader import UnquotedMark

FENCE = "```"

_LANGUAGES = ("json", "")
_SHOWING = 512  # characters of a fence that show whether it may begin a call
_BEGINS_LINE = re.compile(r"(?:\A|\n)[ \t]*\Z")
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class FencedCall:
    """A call that stood in a fence; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Fence:
    """A code fence that was decided."""

    size: int  # characters of it: all of it if it is calls or was read to its end, else what opens it
    calls: Sequence[FencedCall] = ()  # those in it; empty if it is text
    is_open: bool = False  # it is text, and continues


class FenceReader:
    """Decides whether code fences are calls.

    Args:
        tools: those that may be called.
        several: whether an answer may have more than one call. If not, its first one counts: others in the
            same fence are dropped, and later fences are text.
    """

    def __init__(self, tools: Sequence[Tool], *, several: bool = True) -> None:
        self._tools = {tool.name for tool in tools}
        self._several = several
        self._had_call = False
        calls = [f'{{"name":"{name}"' for name in self._tools] + ['{"arguments":']
        self._beginnings = [begin + call for begin in ("", "[") for call in calls]
        self._end: UnquotedMark | None = None  # finds the end of the fence

    def decide(self, text: str, *, final: bool) -> Fence | None:
        """Decide about the fence that a text begins with; None if more of the text is needed.

        Args:
            final: there is no more text. A call without its closing fence counts as one.
        """
        decided = self._decided(text, final=final)
        if decided is not None:
            self._end = None
            self._had_call = self._had_call or bool(decided.calls)
        return decided

    def decide_whole(self, text: str, *, final: bool) -> Sequence[FencedCall] | None:
        """Decide whether an answer is calls and nothing else; None if more of it is needed.

        Args:
            text: the answer so far.
            final: there is no more.
        """
        if not self._may_be_calls(text):
            return ()
        if not final:
            return None
        calls = self._calls(text)
        self._had_call = bool(calls)
        return calls

    def _may_be_calls(self, text: str) -> bool:
        """True if the first characters of a text may begin the JSON of a call."""
        shown = re.sub(r"\s+", "", text[:_SHOWING])
        return any(shown.startswith(begin) or begin.startswith(shown) for begin in self._beginnings)

    def _decided(self, text: str, *, final: bool) -> Fence | None:
        opened = Fence(len(FENCE), is_open=True)
        if self._had_call and not self._several:
            return opened
        line, newline, body = text[len(FENCE) : _SHOWING].partition("\n")
        if not newline:
            undecided = any(name.startswith(line.strip(" \r\t")) for name in _LANGUAGES)
            return None if undecided and not final else opened
        if line.strip() not in _LANGUAGES or not self._may_be_calls(body):
            return opened
        start = len(FENCE) + len(line) + 1
        if self._end is None:
            self._end = UnquotedMark(FENCE, '"')
            self._end.at = start
        at = self._end.find(text)
        if at >= 0:
            calls = self._calls(text[start:at])
            if calls or begins_line(text[:at]):
                return Fence(at + len(FENCE), calls)
            return opened
        if not final:
            return None
        calls = self._calls(text[start:])
        return Fence(len(text), calls) if calls else opened

    def _calls(self, body: str) -> Sequence[FencedCall]:
        """Parse the JSON in a fence as tool calls; none if any item is not one."""
        try:
            values = list(_values(body))
            calls = [self._call(value) for value in values]
        except (ValueError, RecursionError):
            return ()
        found = [call for call in calls if call is not None]
        if len(found) < len(calls):
            return ()
        return found if self._several else found[:1]

    def _call(self, value: Any) -> FencedCall | None:
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return None
        name = value["name"]
        if not isinstance(name, str) or name not in self._tools or not isinstance(value["arguments"], dict):
            return None
        arguments = json.dumps(value["arguments"], ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half a surrogate pair is a ValueError, as NaN is
        return FencedCall(name, arguments)


def begins_line(before: str) -> bool:
    """True if only space follows the last newline of a text."""
    return _BEGINS_LINE.search(before[-64:] if len(before) > 64 else before) is not None


def _values(body: str) -> Iterator[Any]:
    """The JSON values that a text consists of; of a list, its items.

    Raises:
        ValueError: it consists of something else.
    """
    decoder, at = json.JSONDecoder(), 0
    while True:
        between = _BETWEEN.match(body, at)
        at = between.end() if between is not None else at
        if at == len(body):
            return
        value, at = decoder.raw_decode(body, at)
        yield from value if isinstance(value, list) else [value]
