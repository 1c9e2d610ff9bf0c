"""Reads calls that are JSON as they are generated, a piece of their arguments at a time."""

from __future__ import annotations

import json
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
        head: what stands before the arguments; group 1 is the name, in quotes if it is JSON.
        ends: what follows the last call; empty if nothing does.
        repeats: whether another call may follow with a trigger of its own.
    """

    def __init__(self, head: re.Pattern[str], ends: str, *, repeats: bool) -> None:
        self._head = head
        self._ends = ends.strip()
        self._repeats = repeats
        self._in_arguments = False
        self._had_arguments = False
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        """See `CallReader`."""
        if self._in_arguments:
            size = self._size_of_arguments(text)
            return text[:size], text[size:]
        match = self._head.match(text)
        # A head that ends with the text may still grow by space.
        if match and match.end() < len(text):
            self._in_arguments = True
            name = match[1]
            return CallName(json.loads(name) if name.startswith('"') else name), text[match.end() :]
        if self._had_arguments and self._repeats:
            at = text.find(self._ends)
            if at >= 0:
                return CallEnd(), text[at + len(self._ends) :]
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
