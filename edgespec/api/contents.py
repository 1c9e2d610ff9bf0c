"""Contents of messages in any of the three APIs, as texts and images: there is a note for anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from edgespec.api.fields import converted
from edgespec.api.warnings import Warnings, shown
from edgespec.text.unreadable import READS_TEXT, note_for

TEXTS = frozenset((None, "text", "input_text", "output_text", "summary_text", "reasoning_text"))
"""Types of parts that are texts."""

_THOUGHTS = frozenset(("thinking", "reasoning", "reasoning_text", "redacted_thinking"))
_IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
_THINGS = {
    **dict.fromkeys(_IMAGES, "An image"),
    "audio": "A sound",
    "input_audio": "A sound",
    "video": "A video",
    "video_url": "A video",
    "file": "A file",
    "input_file": "A file",
    "document": "A document",
    "container_upload": "A file",
}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{,15}:", re.IGNORECASE)  # which Base64 cannot begin with

Content = str | list[dict[str, Any]]
"""A text, or parts of which some are images."""

ADDRESS = "image_url"
"""The type of an image among parts, and its field: an object with a "url"."""

# At least two hyphens: a prompt about an "X-ray: ..." must not lose its first line.
_HEADERS = re.compile(r"(?:x(?:-[a-z0-9]+){2,}:[^\r\n]*(?:\r?\n\s*|\Z))+", re.IGNORECASE)
_HEADER_NAME = re.compile(r"^x[a-z0-9-]+:", re.IGNORECASE | re.MULTILINE)


class Address(Struct):
    """The address of an image."""

    url: str | None = None


class Source(Struct):
    """The source of an image or a document."""

    type: str | None = None
    data: str | None = None
    content: Any = None
    url: str | None = None
    file_id: str | None = None


class Part(Struct):
    """A part of a content: a text, an image, a thought, a call, the result of one, and more."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    image_url: str | Address | None = None
    image: str | Address | None = None
    file_id: str | None = None
    source: str | Source | None = None
    data: str | None = None
    title: str | None = None
    tool_name: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: Any = None
    output: Any = None
    results: Any = None
    refusal: str | None = None

    @property
    def is_thought(self) -> bool:
        """True if it is of an answer's thought."""
        return self.type in _THOUGHTS

    @property
    def address(self) -> str | None:
        """The address of an image, empty if it has none; None if the part is something else."""
        if self.type not in _IMAGES:
            return None
        source = self.source if isinstance(self.source, Source) else None
        if source is not None and source.type != "base64":
            return source.url or source.file_id or ""
        data = self.data if source is None else source.data
        if source is not None or data is not None:
            return data_address(data)
        found = self.image_url or self.image or self.file_id
        return (found.url if isinstance(found, Address) else found) or ""


Parts = Sequence[str | Part]


def parts_of(content: object) -> list[str | Part]:
    """The parts of a content. Results of tools that a client has not written out become JSON."""
    if content is None:
        return []
    parts = content if isinstance(content, list) else [content]
    return [_part(part, f"content[{place}]") for place, part in enumerate(parts)]


def text_of(content: object, warnings: Warnings, between: str = "") -> str:
    """The text of a content: of all its parts, joined.

    Parts that are no text become notes, so that the conversation makes sense to the model.

    Args:
        between: text between two parts.
    """
    texts = [_text(part, warnings) for part in parts_of(content)]
    return between.join(text for text in texts if text is not None)


def content_of(content: object, warnings: Warnings, between: str = "") -> Content:
    """A content as `text_of` gives it; with parts, if some are images, whose addresses are not looked at.

    Args:
        between: text between two parts.
    """
    parts = parts_of(content)
    if all(isinstance(part, str) or part.address is None for part in parts):
        return text_of(parts, warnings, between)
    told: list[dict[str, Any]] = []
    for part in parts:
        address = None if isinstance(part, str) else part.address
        text = _text(part, warnings) if address is None else None
        if address is None and text is None:
            continue
        if told and between:
            told.append(text_part(between))
        told.append(text_part(text or "") if address is None else image_part(address))
    return told


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(address: str) -> dict[str, Any]:
    return {"type": ADDRESS, ADDRESS: {"url": address}}


def data_address(data: object) -> str:
    """The address of an image in Base64, or of one that is an address anyway; empty for none."""
    if not isinstance(data, str) or not data:
        return ""
    return data if _SCHEME.match(data) else f"data:;base64,{data}"


def thought_of(parts: Parts) -> str:
    """The thought among the parts of an answer; empty if there is none."""
    found = [part for part in parts if isinstance(part, Part) and part.is_thought]
    return "".join(part.thinking or part.text or "" for part in found)


def without_thoughts(parts: Parts) -> list[str | Part]:
    """The parts of an answer without its thought."""
    return [part for part in parts if isinstance(part, str) or not part.is_thought]


def note(what: str, warnings: Warnings) -> str:
    """The text in the place of what cannot be read, which a warning names.

    Args:
        what: "An image", for example.
    """
    warnings.add(f"{what} was replaced by a note. {READS_TEXT}")
    return note_for(what)


def _part(part: object, at: str) -> str | Part:
    if isinstance(part, str | Part):
        return part
    if isinstance(part, dict) and ("type" in part or "text" in part):
        return converted(part, Part, at)
    return json.dumps(part, ensure_ascii=False)


def _text(part: str | Part, warnings: Warnings) -> str | None:
    """The text of a part; None if it says nothing."""
    if isinstance(part, str):
        return part
    kind, source = part.type, part.source
    if kind in TEXTS and part.text is not None:
        return part.text
    if part.is_thought:
        warnings.add("Ignored a thought outside of an answer.")
        return None
    if kind == "tool_reference":
        return f"The tool {part.tool_name} is available."
    title = [part.title] if part.title else []
    if kind == "document" and isinstance(source, Source) and source.type in ("text", "content"):
        return "\n".join([*title, text_of(source.data or source.content, warnings, "\n")])
    if kind == "search_result":
        address = source if isinstance(source, str) else ""
        return "\n".join([*title, address, text_of(part.content, warnings, "\n")])
    if kind in _THINGS:
        return note(_THINGS[kind], warnings)
    for said in (part.text, part.content, part.output, part.results, part.refusal):
        if isinstance(said, str):
            return said
    return note(f"Content of the type {shown(kind)}", warnings)


def without_header_lines(parts: list[str | Part], warnings: Warnings) -> list[str | Part]:
    """The parts of a system prompt without header lines at the front of the first, which a warning names.

    Some programs begin their system prompt with lines in the form of HTTP headers, such as Claude Code's
    `x-anthropic-billing-header: cc_version=...`. Their values change with every session or request, so
    nothing behind them would ever be found in the cache. Only this form is left out: any other line may mean
    something to the model, whether it changes or not.
    """
    if not parts:
        return parts
    first, *others = parts
    text = first if isinstance(first, str) else first.text if first.type in TEXTS else None
    headers = _HEADERS.match(text or "")
    if not text or not headers:
        return parts
    for name in _HEADER_NAME.findall(headers[0]):
        warnings.add(f"Left out the line {name.lower()!r} of the system prompt, which is not for the model.")
    rest = text[headers.end() :]
    return [*([rest] if rest else []), *others]
