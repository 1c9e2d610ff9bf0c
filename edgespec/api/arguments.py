"""Arguments of calls in a conversation: JSON, or the beginning of it where the answer was cut off."""

from __future__ import annotations

import json
from typing import Any

from edgespec.api.warnings import Warnings

_ESCAPE_LENGTH = len("\\u0000")
_MAX_DEPTH = 100


def arguments_of(value: object, name: str, warnings: Warnings) -> dict[str, Any]:
    """The arguments of a call as an object: templates take no other form.

    Args:
        value: the object, its JSON, or the beginning of that.
        name: of the tool.
    """
    said = value
    if isinstance(value, str) and value.strip():
        try:
            said = json.loads(value)
        except (ValueError, RecursionError):
            said = _completed(value) if value.lstrip().startswith("{") else value
            if isinstance(said, dict):
                warnings.add(f"Completed the JSON of a call of {name} that was cut off.")
    if said is None or (isinstance(said, str) and not said.strip()):
        return {}
    if isinstance(said, dict):
        return said
    warnings.add(f"The arguments of a call of {name} are not a JSON object; the model gets them as text.")
    return {"arguments": value}


def _completed(text: str) -> Any:
    """The value of JSON that was cut off, with what is complete of it; the text itself if it is no JSON."""
    closing, in_string, escape = [], False, -1  # where the last escape begins
    for place, character in enumerate(text):
        if in_string:
            if character == "\\" and place != escape + 1:
                escape = place
            elif character == '"' and place != escape + 1:
                in_string, escape = False, -1
        elif character == '"':
            in_string, escape = True, -2
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
        elif character in "}]" and closing:
            closing.pop()
    if len(closing) > _MAX_DEPTH:
        return text
    if in_string:
        last = text[escape:] if escape >= 0 else ""
        cut = last == "\\" or (last.startswith("\\u") and len(last) < _ESCAPE_LENGTH)
        text = (text[:escape] if cut else text) + '"'
    begun, ends = text.rstrip(), "".join(reversed(closing))
    word = 1 + max(map(begun.rfind, ",:[{ \n\t"))
    # A value may be missing, an item may not have begun, and a word may be incomplete.
    for whole in (begun, f"{begun}: null", f"{begun} null", begun.rstrip(","), f"{begun[:word]}null"):
        try:
            return json.loads(whole + ends)
        except (ValueError, RecursionError):
            continue
    return text
