"""Image files: the formats that are read, and limits on them.

Images come from strangers, so only a child process decodes one (`llama.projector`). Here, its first
bytes name its format.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import UsageError

MAX_BYTES = 32 << 20
MAX_PIXELS = 64 << 20
MAX_SIDE = 32_768
SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".avif", ".heic", ".tif", ".tiff")

_FIRST_BYTES = 18  # by which a format is known
_MEDIA_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"BM": "image/bmp",
}
_FORMATS = "PNG, JPEG, WebP, GIF and BMP files can be read."


def media_type(data: bytes) -> str:
    """The media type of an image by its first bytes; empty if its format is not read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith(b"BM") and data[15:_FIRST_BYTES] != bytes(3):  # a text that begins with these letters
        return ""
    return next((kind for begin, kind in _MEDIA_TYPES.items() if data.startswith(begin)), "")


def is_image(path: Path) -> bool:
    """True if a file is an image that can be read, judging by its first bytes."""
    try:
        with path.open("rb") as file:
            return bool(media_type(file.read(_FIRST_BYTES)))
    except OSError:
        return False


def read_image(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file.", "Name an image file.")
        if not path.is_file():
            raise UsageError(f"There is no image file {path}.", "Check the path.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    check_image(data, str(path))
    return data


def check_image(data: bytes, name: str) -> None:
    """Refuse a file that is too large, or of a format that is not read; nothing of it is decoded.

    Args:
        name: of the image, for messages.
    """
    if not data:
        raise UsageError(f"{name} is empty.", _FORMATS)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB.", "Make the image smaller.")
    if not media_type(data):
        raise UsageError(f"{name} is not an image that can be read.", _FORMATS)


def check_size(width: int, height: int, name: str) -> None:
    """Refuse a picture that is too large, or has no pixels."""
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise UsageError(
            f"{name} has {width} x {height} pixels; up to {MAX_PIXELS >> 20} million are read, and up to "
            f"{MAX_SIDE} a side.",
            "Make the image smaller.",
        )
