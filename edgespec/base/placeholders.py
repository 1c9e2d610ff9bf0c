"""Numbers that stand in a conversation for what a chat template must not read, while it is rendered.

They are numbers because filters such as trim and upper leave digits alone. They begin with a key that is
drawn anew for each conversation, so nobody can write one into a text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

_DIGITS = 8  # of an index


class Placeholders:
    def __init__(self) -> None:
        self._key = str(10**31 + secrets.randbelow(9 * 10**31))

    def of(self, index: int) -> str:
        """The placeholder with a number of its own."""
        return f"{self._key}{index:0{_DIGITS}d}"

    def split(self, text: str) -> Iterator[str | int]:
        """Yield a text in order: the parts that are not empty, and the indexes of the placeholders."""
        parts = re.split(rf"{self._key}(\d{{{_DIGITS}}})", text)  # text, index, text, index, ..., text
        for place, part in enumerate(parts):
            if place % 2:
                yield int(part)
            elif part:
                yield part
