"""The calls that chat templates render so that their layout is learned: names and values found in none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgespec.text.calls.layout import TEXT_TYPE

QUESTION, ANSWER, RESULT, THOUGHT = "probequestion", "probeanswer", "proberesult", "probethought"
NAMES = ("probealpha", "probebeta")
IDS = ("probeid01", "probeid02")
NAMED_IDS = ("functions.probealpha:0", "functions.probebeta:1")  # of templates that show ids only (Kimi)
# The names are in alphabetical order, since some templates sort them.
VALUES: dict[str, Any] = {
    "arga": "probetext",
    "argb": "another text",
    "argc": 7,
    "argd": 1.5,
    "arge": True,
    "argf": None,
    "argg": ["x", 1],
    "argh": {"y": True},
    "argi": "last text",
}
TYPES = {
    "argc": "integer",
    "argd": "number",
    "arge": "boolean",
    "argf": "null",
    "argg": "array",
    "argh": "object",
}
FIRST, LAST = "arga", "argi"
ONE_VALUE = {FIRST: VALUES[FIRST]}

MARK = re.compile(r"\]<\]\w+\[>\[|<[^<>]*>?|\[[A-Z_/]+\]")  # MiniMax's first
# Where two renderings begin to differ within a mark, the whole mark differs.
_SEGMENT = re.compile(rf"{MARK.pattern}|\s+|\d+|\w+|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """The marks, words, numbers and white space of a text."""
    return _SEGMENT.findall(text)


def _tool(name: str, types: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: {"type": types.get(key, TEXT_TYPE), "description": "A value."} for key in VALUES}
    parameters = {"type": "object", "properties": properties, "required": [FIRST]}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


# The tools, with and without the types that some templates do not know.
TOOLS = [[_tool(name, types) for name in NAMES] for types in (TYPES | {"argf": TEXT_TYPE}, {})]
