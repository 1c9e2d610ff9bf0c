"""Notes in place of the parts of a message that a model cannot read."""

from __future__ import annotations

READS_TEXT = "This model reads text only."


def note_for(what: str) -> str:
    """The note for one part.

    Args:
        what: "An image", for example.
    """
    return f"[{what} was here. {READS_TEXT}]"
