"""Contents of messages in any of the three APIs, as texts and images: there is a note for anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgespec.api.values import shown
from edgespec.api.warnings import Warnings
from edgespec.text.unreadable import READS_TEXT, note_for

_TEXTS = frozenset((None, "text", "input_text", "output_text", "summary_text", "reasoning_text"))
THOUGHTS = frozenset(("thinking", "reasoning", "reasoning_text", "redacted_thinking"))
"""Parts of an answer that are its thought."""

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

_TEXT_FIELDS = ("text", "content", "output", "results", "refusal")


def text_of(content: object, warnings: Warnings, between: str = "") -> str:
    """The text of a content: of all its parts, joined.

    Parts that are no text become notes, so that the conversation makes sense to the model.

    Args:
        between: text between two parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [_part(part, warnings) for part in parts]
    return between.join(text for text in texts if text is not None)


def content_of(content: object, warnings: Warnings, between: str = "") -> Content:
    """A content as `text_of` gives it; with parts, if some are images, whose addresses are not looked at.

    Args:
        between: text between two parts.
    """
    parts = content if isinstance(content, list) else [content]
    if all(_address(part) is None for part in parts):
        return text_of(content, warnings, between)
    told: list[dict[str, Any]] = []
    for part in parts:
        address = _address(part)
        text = None if address is not None else _part(part, warnings)
        if address is None and text is None:
            continue
        if told and between:
            told.append(text_part(between))
        told.append(text_part(text or "") if address is None else image_part(address))
    return told


def text_part(text: str) -> dict[str, Any]:
    """A text among the parts of a content."""
    return {"type": "text", "text": text}


def image_part(address: str) -> dict[str, Any]:
    """An image among the parts of a content."""
    return {"type": ADDRESS, ADDRESS: {"url": address}}


def data_address(data: object) -> str:
    """The address of an image in Base64, or of one that is an address anyway; empty for none."""
    if not isinstance(data, str) or not data:
        return ""
    return data if _SCHEME.match(data) else f"data:;base64,{data}"


def thought_of(content: object) -> str:
    """The thought among the parts of an answer; empty if there is none."""
    parts = content if isinstance(content, list) else []
    found = [
        part.get("thinking") or part.get("text")
        for part in parts
        if isinstance(part, Mapping) and part.get("type") in THOUGHTS
    ]
    return "".join(text for text in found if isinstance(text, str))


def without_thoughts(content: object) -> object:
    """A content without its thoughts."""
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and part.get("type") in THOUGHTS)]


def note(what: str, warnings: Warnings) -> str:
    """The text in the place of what cannot be read, which a warning names.

    Args:
        what: "An image", for example.
    """
    warnings.add(f"{what} was replaced by a note. {READS_TEXT}")
    return note_for(what)


def _address(part: object) -> str | None:
    """The address of a part that is an image, empty if it has none; None if it is something else."""
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGES:
        return None
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "base64":
            return data_address(source.get("data"))
        found = source.get("url") or source.get("file_id")
    elif "data" in part:
        return data_address(part["data"])
    else:
        found = part.get("image_url") or part.get("image") or part.get("file_id")
        if isinstance(found, Mapping):
            found = found.get("url")
    return found if isinstance(found, str) else ""


def _part(part: object, warnings: Warnings) -> str | None:
    """The text of a part; None if it says nothing."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or (kind is None and "text" not in part):
        return json.dumps(part, ensure_ascii=False)  # a result of a tool that its client has not written out
    if not isinstance(kind, str | None):
        return note("Content of an unknown type", warnings)
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in THOUGHTS:
        warnings.add("Ignored a thought outside of an answer.")
        return None
    if kind == "tool_reference":
        return f"The tool {part.get('tool_name')} is available."
    source = part.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        text = text_of(source.get("data") or source.get("content"), warnings, "\n")
        return "\n".join([*_title(part), text])
    if kind == "search_result":
        address = part.get("source")
        return "\n".join([*_title(part), str(address or ""), text_of(part.get("content"), warnings, "\n")])
    if kind in _THINGS:
        return note(_THINGS[kind], warnings)
    for name in _TEXT_FIELDS:
        if isinstance(part.get(name), str):
            return str(part[name])
    return note(f"Content of the type {shown(kind)}", warnings)


def _title(part: Mapping[str, Any]) -> list[str]:
    title = part.get("title")
    return [title] if isinstance(title, str) and title else []
