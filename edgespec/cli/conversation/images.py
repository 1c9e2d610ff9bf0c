"""Images that are shown to a model before a question."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.files.user_folders import expanded

if TYPE_CHECKING:
    from edgespec.images.parts import Image
    from edgespec.text.encoding import Prompt


def read_images(names: Sequence[str] | None) -> list[Image]:
    """The images of --image.

    Raises:
        UsageError: one cannot be read, is too large, or is no image.
    """
    if not names:
        return []
    from edgespec.images.file import read_image
    from edgespec.images.parts import Image

    return [Image(read_image(expanded(name)), name) for name in names]


def after_images(text: str, parts: Sequence[Mapping[str, Any]]) -> Prompt:
    """The question as a message that begins with images, given as parts; the text alone if there are none."""
    if not parts:
        return text
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def data_part(image: Image) -> Mapping[str, Any]:
    """An image as part of a message."""
    return {"type": "image", "data": image.data, "name": image.name}


def digest_part(image: Image) -> Mapping[str, Any]:
    """What tells an image apart from others, as a part of a message that is only compared."""
    return {"type": "image", "sha256": hashlib.sha256(image.data).hexdigest()}
