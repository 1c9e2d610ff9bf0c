"""Lines in front of a system prompt that are for a server and not for the model.

Some programs begin their system prompt with lines in the form of HTTP headers, such as Claude Code's
`x-anthropic-billing-header: cc_version=...`. Their values change with every session or request, so nothing
behind them would ever be found in the cache. Only this form is left out: any other line may mean something to
the model, whether it changes or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgespec.api.warnings import Warnings

# At least two hyphens: a prompt about an "X-ray: ..." must not lose its first line.
_HEADERS = re.compile(r"(?:x(?:-[a-z0-9]+){2,}:[^\r\n]*(?:\r?\n\s*|\Z))+", re.IGNORECASE)
_NAME = re.compile(r"^x[a-z0-9-]+:", re.IGNORECASE | re.MULTILINE)
_TEXTS = ("text", "input_text")


def without_header_lines(content: object, warnings: Warnings) -> object:
    """The content of a system prompt without header lines at its front, which a warning names.

    Args:
        content: a text, or a list of parts, of which only the first is looked at.
    """
    if isinstance(content, list) and content:
        first, *rest = content
        if not isinstance(first, Mapping) or first.get("type") not in _TEXTS:
            return content
        kept = without_header_lines(first.get("text"), warnings)
        return content if kept is first.get("text") else [*([{**first, "text": kept}] if kept else []), *rest]
    if not isinstance(content, str) or not (headers := _HEADERS.match(content)):
        return content
    for name in _NAME.findall(headers[0]):
        warnings.add(f"Left out the line {name.lower()!r} of the system prompt, which is not for the model.")
    return content[headers.end() :]
