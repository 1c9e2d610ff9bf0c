"""Arguments of calls in a conversation: JSON, or the beginning of it where the answer was cut off."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from edgespec.api.warnings import Warnings


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
            said = _completed(value)
            if isinstance(said, dict):
                warnings.add(f"Completed the JSON of a call of {name} that was cut off.")
    if said is None or (isinstance(said, str) and not said.strip()):
        return {}
    if isinstance(said, dict):
        return said
    warnings.add(f"The arguments of a call of {name} are not a JSON object; the model gets them as text.")
    return {"arguments": value}


def _completed(text: str) -> Any:
    """The complete parts of JSON that was cut off; the text itself if it is no JSON."""
    import jiter

    with suppress(ValueError):
        return jiter.from_json(text.encode("utf-8", "replace"), partial_mode="trailing-strings")
    return text
