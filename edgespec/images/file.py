"""Image files, and limits on them.

Only a child process decodes an image. What is refused here need not be tried.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import UsageError
from edgespec.images.formats import (
    BMP_HEADER,
    DamagedImage,
    IncompleteImage,
    begins_like_image,
    read_picture,
)

MAX_BYTES = 32 << 20
MAX_PIXELS = 64 << 20
_MAX_SIDE = 32_768
_FORMATS = "PNG, JPEG, GIF and BMP files can be read."


SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".avif", ".heic", ".tif", ".tiff")


def is_image(path: Path) -> bool:
    """True if a file is an image that can be read, judging by its first bytes."""
    try:
        with path.open("rb") as file:
            return begins_like_image(file.read(BMP_HEADER + 4))
    except OSError:
        return False


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
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    check_image(data, str(path))
    return data


def check_image(data: bytes, name: str) -> None:
    """Refuse what is too large, not whole, or no image of a format that is decoded.

    Args:
        name: what the image is called in messages.

    Raises:
        UsageError: it is refused.
    """
    if not data:
        raise UsageError(f"{name} is empty.", _FORMATS)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB.", "Make the image smaller.")
    try:
        picture = read_picture(data)
    except IncompleteImage:
        raise UsageError(
            f"{name} is incomplete: it ends within the picture.", "Get the file again."
        ) from None
    except DamagedImage:
        raise UsageError(f"{name} is a damaged image.", "Save the image anew.") from None
    if picture is None:
        raise UsageError(f"{name} is not an image that can be read.", _FORMATS)
    check_size(picture.width, picture.height, name)


def check_size(width: int, height: int, name: str) -> None:
    """Refuse a picture that is too large, or has no pixels.

    Raises:
        UsageError: it is refused.
    """
    if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE and width * height <= MAX_PIXELS):
        raise UsageError(
            f"{name} claims {width} x {height} pixels; up to {MAX_PIXELS >> 20} million are read, and up to "
            f"{_MAX_SIDE} a side.",
            "Make the image smaller.",
        )
