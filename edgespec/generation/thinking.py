"""The amount of thinking before an answer, in a word: a plain value that commands and requests share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.errors import InvalidValueError
from edgespec.printable import shown

EFFORTS = ("low", "medium", "high")
MAX_BUDGET = 1_000_000
_BUDGET = re.compile(r"(?:budget[ :=]\s*)?(\d{1,7})", re.ASCII)


@dataclass(frozen=True)
class ThinkingRequest:
    """A request for thinking by a model that can think."""

    enabled: bool | None = None  # whether it thinks at all; None leaves that to its chat template
    budget: int | None = None  # most tokens of the thought, which is then closed; None sets no limit
    # one of EFFORTS for templates that know `reasoning_effort`; empty leaves it to the template
    effort: str = ""


def think_text(value: object) -> str:
    """The text for a value from JSON or a program, which may also be true, false, or a number of tokens.

    Raises:
        InvalidValueError: it is of another kind.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and 0 <= value <= MAX_BUDGET:
        return str(value)
    if isinstance(value, str):
        return value
    raise InvalidValueError(
        "think", f"must be true, false, a number of tokens, or a string such as 'off', not {shown(value)}."
    )


def parse_think(text: str) -> ThinkingRequest:
    """Parse "auto", "on", "off", "low", "medium", "high", "500" or "budget 500".

    Raises:
        InvalidValueError: it is something else.
    """
    word = text.strip().lower()
    if word in ("auto", ""):
        return ThinkingRequest()
    if word in ("on", "off"):
        return ThinkingRequest(enabled=word == "on")
    if word in EFFORTS:
        return ThinkingRequest(enabled=True, effort=word)
    match = _BUDGET.fullmatch(word)
    if match is None or int(match[1]) > MAX_BUDGET:
        raise InvalidValueError(
            "think",
            f"must be auto, on, off, {', '.join(EFFORTS)} or a maximum number of tokens, not {shown(text)}.",
        )
    return ThinkingRequest(enabled=True, budget=int(match[1]))
