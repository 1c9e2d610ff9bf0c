"""Reads calls that are JSON as they are generated, a piece of their arguments at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallName:
    """The name in the head of a call."""

    name: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete."""


class CallReader(Protocol):
    """Reads the calls behind one trigger."""

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        """Read the first part of a text; returns it and the rest.

        Returns:
            A name, the end, or JSON that belongs to the arguments; "" if more of the text is needed.
        """


class JsonCallReader:
    """Reads calls whose arguments are JSON.

    Args:
        head: matches the text before the arguments of the first call; group 1 is the name.
        following: the same for further calls behind the same trigger; None if there are none.
        ends: matches the text behind the last call; None if a call ends with its arguments.
    """

    def __init__(
        self, head: re.Pattern[str], following: re.Pattern[str] | None, ends: re.Pattern[str] | None
    ) -> None:
        self._head = head
        self._following = following
        self._ends = ends
        self._in_arguments = False
        self._had_arguments = False
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        if self._in_arguments:
            size = self._size_of_arguments(text)
            return text[:size], text[size:]
        head = self._following if self._had_arguments else self._head
        found = head.match(text) if head is not None else None
        if found is not None:
            self._in_arguments = True
            return CallName(found[1]), text[found.end() :]
        if self._had_arguments:
            if self._ends is None:
                if self._following is None:
                    return CallEnd(), text
            else:
                end = self._ends.search(text)
                if end is not None:
                    return CallEnd(), text[end.end() :]
        return "", text

    def _size_of_arguments(self, text: str) -> int:
        """Return the length of the arguments, which end where their brackets close."""
        for at, character in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._in_arguments, self._had_arguments = False, True
                    return at + 1
        return len(text)


class UnquotedMark:
    """Finds a mark outside of quotes in a text that comes in pieces, whose earlier pieces it reads once.

    Args:
        quotes: those that texts may stand between; a text ends with its line in any case.

    Attributes:
        at: where reading continues; no mark, and no part of one, is before.
    """

    def __init__(self, mark: str, quotes: str) -> None:
        self._mark = mark
        self._pieces = re.compile(rf"\\.|[\n{quotes}]|{re.escape(mark)}", re.DOTALL)
        self._quote = ""
        self.at = 0

    def find(self, text: str) -> int:
        """The position where the mark begins; -1 if it is not there yet."""
        end = len(text) - overlap(text, self._mark)
        while (found := self._pieces.search(text, self.at)) is not None:
            piece = found[0]
            if piece == self._mark and not self._quote:
                return found.start()
            if found.start() >= end:
                break
            self.at = found.end()
            if piece in ("\n", self._quote):
                self._quote = ""
            elif not self._quote and len(piece) == 1:
                self._quote = piece
        self.at = max(self.at, end - text.endswith("\\"))
        return -1


def overlap(text: str, mark: str) -> int:
    """The length of the text's end with which a mark begins."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
