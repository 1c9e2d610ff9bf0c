"""Images among the parts of chat messages.

A message's content may be a list of parts: `{"type": "text", "text": ...}`, and `{"type": "image"}` with the
"path" of a file, its "data", or an "image" of Pillow. Chat templates differ in how they show such lists, so
each image passes through the template as a placeholder in the text, as control strings do, and its tokens
take that place.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgespec.base.placeholders import Placeholders
from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded
from edgespec.images.file import check_image, check_size, media_type, read_image
from edgespec.printable import shown

UNNAMED = "The image"


def hash_of(data: bytes) -> str:
    """The hash of an image, by which images are told apart."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Image:
    """An image of a prompt, and what it is called in messages."""

    data: bytes
    name: str

    @property
    def part(self) -> Mapping[str, Any]:
        return {"type": "image", "data": self.data, "name": self.name}

    @property
    def url(self) -> str:
        return f"data:{media_type(self.data)};base64,{base64.b64encode(self.data).decode()}"

    @cached_property
    def sha256(self) -> str:
        """The hash of its bytes."""
        return hash_of(self.data)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if there is an image among the parts of a message."""
    return any(
        isinstance(part, Mapping) and part.get("type") == "image"
        for message in messages
        if isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


class WithPlaceholders:
    """Messages with placeholders for their images.

    Attributes:
        messages: with texts for contents.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._placeholders = Placeholders()
        self._images: list[Image] = []
        self.messages = [self._with_placeholders(message) for message in messages]

    def split(self, text: str) -> list[str | Image]:
        """A text, divided at its images."""
        return [
            self._images[part] if isinstance(part, int) else part for part in self._placeholders.split(text)
        ]

    def require_all(self, text: str, refused: Callable[[], Exception]) -> None:
        """Raise unless a rendered conversation has every image once, in their order."""
        found = [part for part in self._placeholders.split(text) if isinstance(part, int)]
        if found != list(range(len(self._images))):
            raise refused()

    def _with_placeholders(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": "".join(map(self._as_text, content))}

    def _as_text(self, part: Any) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind != "image":
            raise UsageError("A part of a message is neither a text nor an image.")
        self._images.append(_image_of(part))
        return self._placeholders.of(len(self._images) - 1)


def _image_of(part: Mapping[str, Any]) -> Image:
    if (data := part.get("data")) is not None:
        if not isinstance(data, bytes):
            raise UsageError("The data of an image must be bytes.")
        return image_of(data, str(part.get("name", UNNAMED)))
    if "image" in part:
        return image_of(part["image"])
    if "path" not in part:
        raise UsageError('An image has neither "path" nor "data" nor "image".', "Give one of them.")
    found = image_of(part["path"])
    if part.get("sha256", found.sha256) != found.sha256:
        raise UsageError(f"{found.name} has changed since the lines were read.", "Run the batch again.")
    return found


def image_of(source: object, name: str = UNNAMED) -> Image:
    """An image, from its file, its bytes, or an image of Pillow.

    Args:
        source: the path of a file, the bytes of one, or a `PIL.Image.Image`.
        name: what the bytes are called in messages.
    """
    pillow = sys.modules.get("PIL.Image")  # whoever has such an image has imported it
    if pillow is not None and isinstance(source, pillow.Image):
        return _image_of_pillow(source, name)
    if isinstance(source, bytes):
        check_image(source, name)
        return Image(source, name)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"An image must be a path, bytes or an image of Pillow, not {shown(source)}.")
    path = expanded(source)
    return Image(read_image(path), str(path))


def _image_of_pillow(source: Any, name: str) -> Image:
    """An image of Pillow as a PNG, turned as it says."""
    from PIL import ImageOps

    name = str(getattr(source, "filename", "") or name)
    width, height = source.size
    check_size(width, height, name)
    file = io.BytesIO()
    try:
        picture = ImageOps.exif_transpose(source)
        if not picture.mode.startswith("I;16"):  # which `convert` would cut off at 255
            picture = picture.convert("RGB")
        picture.save(file, "PNG", compress_level=1)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow decodes a file only now
        raise UsageError(f"{name} cannot be read: {error}.", "Check the image.") from error
    return Image(file.getvalue(), name)
