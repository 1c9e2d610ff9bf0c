"""Images in requests, as parts of messages that the engine takes. Nothing is fetched or read from disk."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.api.contents import ADDRESS, Content, note
from edgespec.api.limits import Limits
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.images.file import MAX_BYTES, check_image
from edgespec.images.parts import hash_of

_SPACE = dict.fromkeys(map(ord, " \t\r\n"))
_HEAD = 256  # characters in which a data URL has its type
DATA_URL = "Send it as a data URL in Base64."
_MAX_CHARS = 4 * (MAX_BYTES // 3 + 2)


def blind() -> bool:
    """Say that a model does not see."""
    return False


class RequestImages:
    """The images of one request.

    Args:
        sees: whether the model does; asked only if there are images.
        hint: how clients send an image.
    """

    def __init__(
        self, limits: Limits, warnings: Warnings, sees: Callable[[], bool], hint: str = DATA_URL
    ) -> None:
        self._limits = limits
        self._warnings = warnings
        self._sees = sees
        self._hint = hint
        self._count = 0

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose images are bytes, or notes where the model does not see them.

        Raises:
            UsageError: an image is not in the request, damaged, too large or of another format; or there are
                too many.
        """
        return [{**message, "content": self._seen(message["content"])} for message in messages]

    def _seen(self, content: Content) -> Content:
        if isinstance(content, str):
            return content
        if self._sees():
            return [self._image(part) if part["type"] == ADDRESS else part for part in content]
        return "".join(
            note("An image", self._warnings) if part["type"] == ADDRESS else part["text"] for part in content
        )

    def _image(self, part: Mapping[str, Any]) -> dict[str, Any]:
        self._count += 1
        if self._count > self._limits.images:
            raise UsageError(f"There are more than {self._limits.images} images in the request.")
        name = f"Image {self._count}"
        return {"type": "image", "data": data_of(part[ADDRESS]["url"], name, self._hint), "name": name}


def without_data(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with digests in place of their images."""
    return [{**message, "content": digested(message["content"])} for message in messages]


def digested(content: Content) -> Content:
    """A content with digests in place of its images."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image", "sha256": part.get("sha256") or hash_of(part["data"])}
        if "data" in part or "sha256" in part
        else part
        for part in content
    ]


def data_of(url: str, name: str, hint: str = DATA_URL) -> bytes:
    """The bytes in a data URL.

    Args:
        name: what the image is called in messages.
        hint: how to send it.
    """
    head, comma, data = url[:_HEAD].partition(",")
    scheme = head.partition(":")[0].lower()
    if not url:
        raise UsageError(f"{name} has no data.", hint)
    if scheme != "data":
        raise UsageError(f"{name} is not in the request, and images are not fetched.", hint)
    if not comma or not head.lower().endswith(";base64"):
        raise UsageError(f"{name} is not in Base64.", "Send data:image/png;base64, and the data behind it.")
    data = url[len(head) + 1 :]
    if len(data) > _MAX_CHARS:  # too large, whatever it is
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB.", "Make the image smaller.")
    try:
        found = base64.b64decode(data.translate(_SPACE), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"{name} is damaged: its Base64 cannot be decoded.", "Send it again.") from None
    check_image(found, name)
    return found
