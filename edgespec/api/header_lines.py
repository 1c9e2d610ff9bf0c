"""Lines in front of a system prompt that are for a server and not for the model.

Some programs begin their system prompt with lines in the form of HTTP headers, such as Claude Code's
`x-anthropic-billing-header: cc_version=...`. Their values change with every session or request, so nothing
behind them would ever be found in the cache. Only this form is left out: any other line may mean something to
the model, whether it changes or not.
"""

from __future__ import annotations

import re

from edgespec.api.contents import TEXTS, Part
from edgespec.api.warnings import Warnings

# At least two hyphens: a prompt about an "X-ray: ..." must not lose its first line.
_HEADERS = re.compile(r"(?:x(?:-[a-z0-9]+){2,}:[^\r\n]*(?:\r?\n\s*|\Z))+", re.IGNORECASE)
_NAME = re.compile(r"^x[a-z0-9-]+:", re.IGNORECASE | re.MULTILINE)


def without_header_lines(parts: list[str | Part], warnings: Warnings) -> list[str | Part]:
    """The parts of a system prompt without header lines at the front of the first, which a warning names."""
    if not parts:
        return parts
    first, *others = parts
    text = first if isinstance(first, str) else first.text if first.type in TEXTS else None
    headers = _HEADERS.match(text or "")
    if not text or not headers:
        return parts
    for name in _NAME.findall(headers[0]):
        warnings.add(f"Left out the line {name.lower()!r} of the system prompt, which is not for the model.")
    rest = text[headers.end() :]
    return [*([rest] if rest else []), *others]
