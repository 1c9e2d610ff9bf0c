"""Text that is safe to show: a file, a model or llama.cpp may put terminal control sequences into it.

`EdgeSpecError` applies this to its messages, and `edgespec.cli.screen` to everything that it prints. So code
in between handles such text as it is, and JSON keeps every character.
"""

from __future__ import annotations

import re

_MAX_SHOWN = 80  # characters of a value in a message
# Escape sequences move the cursor, change colours and titles, or write to the clipboard. Tabs and line breaks
# are harmless. Bidirectional embeddings, overrides and isolates show text in another order than it is in.
_BIDIRECTIONAL = "\u202a-\u202e\u2066-\u2069"
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDIRECTIONAL}]")
_LONE_SURROGATES = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
_UNESCAPED_BY_JSON = re.compile(rf"[\x7f-\x9f{_BIDIRECTIONAL}]")


def printable(text: str) -> str:
    """Replace by U+FFFD what must not be shown: control and bidirectional characters, and lone surrogates."""
    if not text.isascii():
        # Python has bytes of file names and arguments as surrogates, where the locale cannot decode them.
        text = (
            _LONE_SURROGATES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        )
    return _CONTROLS.sub("\ufffd", text)


def shown(value: object) -> str:
    """A value for a message: cut off if it is long, or its type if it cannot be shown."""
    try:
        text = repr(value)
    except Exception:  # a number with too many digits, or whatever an object's own repr raises
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def one_line(text: str) -> str:
    """Replace line breaks by spaces, so that a value cannot pretend to be another line."""
    return " ".join(text.splitlines())


def printable_json(text: str) -> str:
    """Escape the control characters that JSON permits in strings; the value stays the same."""
    return _UNESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
