"""Image files: their format and size, from their first bytes.

Only a child process decodes an image. What is refused here need not be tried.
"""

from __future__ import annotations

import struct
from pathlib import Path

from edgespec.errors import UsageError

MOST_BYTES = 32 << 20
MOST_PIXELS = 64 << 20
_MOST_SIDE = 32_768

_PNG, _BMP = b"\x89PNG\r\n\x1a\n", b"BM"
_JPEG, _GIFS = b"\xff\xd8\xff", (b"GIF87a", b"GIF89a")
_BMP_HEADER = 14  # where the size of the second header is, in four bytes
_MEDIA_TYPES = {
    _PNG: "image/png", _JPEG: "image/jpeg", _GIFS[0]: "image/gif", _GIFS[1]: "image/gif", _BMP: "image/bmp"
}  # fmt: skip
_NO_LENGTH = {0x01, *range(0xD0, 0xD9)}  # JPEG markers that nothing belongs to
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that begin a picture
_FORMATS = "PNG, JPEG, GIF and BMP files can be read."


SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".avif", ".heic", ".tif", ".tiff")


def is_image(path: Path) -> bool:
    """True if a file is an image that can be read, judging by its first bytes."""
    try:
        with path.open("rb") as file:
            begin = file.read(_BMP_HEADER + 4)
    except OSError:
        return False
    if begin.startswith(_BMP):  # so do some texts
        return begin[_BMP_HEADER + 1 :] == b"\0\0\0"
    return begin.startswith((_PNG, _JPEG, *_GIFS))


def media_type(data: bytes) -> str:
    """The media type of an image; empty if its format is not known."""
    return next((kind for begin, kind in _MEDIA_TYPES.items() if data.startswith(begin)), "")


def read_image(path: Path) -> bytes:
    """The content of an image file.

    Raises:
        UsageError: it cannot be read, or is too large, or is no image that can be decoded.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file.", "Name an image file.")
        if not path.is_file():
            raise UsageError(f"There is no image file {path}.", "Check the path.")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    check_image(data, str(path))
    return data


def check_image(data: bytes, name: str) -> None:
    """Refuse what is too large, or no image of a format that is decoded.

    Args:
        name: what the image is called in messages.

    Raises:
        UsageError: it is refused.
    """
    if len(data) > MOST_BYTES:
        raise UsageError(f"{name} has more than {MOST_BYTES >> 20} MiB.", "Make the image smaller.")
    try:
        size = _size(data)
    except (struct.error, IndexError):
        raise UsageError(f"{name} is a damaged image.", "Save the image anew.") from None
    if size is None:
        raise UsageError(f"{name} is not an image that can be read.", _FORMATS)
    width, height = size
    if not (0 < width <= _MOST_SIDE and 0 < height <= _MOST_SIDE and width * height <= MOST_PIXELS):
        raise UsageError(
            f"{name} claims {width} x {height} pixels; up to {MOST_PIXELS >> 20} million are read, and up to "
            f"{_MOST_SIDE} a side.",
            "Make the image smaller.",
        )


def _size(data: bytes) -> tuple[int, int] | None:
    """Width and height as the file states them; None if the format is not known."""
    if data.startswith(_PNG):
        return struct.unpack_from(">II", data, 16)
    if data.startswith(_GIFS):
        return struct.unpack_from("<HH", data, 6)
    if data.startswith(_BMP):
        if struct.unpack_from("<I", data, _BMP_HEADER)[0] == 12:
            return struct.unpack_from("<HH", data, 18)
        width, height = struct.unpack_from("<ii", data, 18)
        return width, abs(height)  # rows may be stored from the top
    return _jpeg_size(data) if data.startswith(_JPEG) else None


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
        if marker not in _NO_LENGTH:
            at += struct.unpack_from(">H", data, at)[0]
