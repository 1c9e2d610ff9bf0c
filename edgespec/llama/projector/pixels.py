"""The pixels of image files, decoded by Pillow, in child processes that limit its memory and time."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")  # of the many that Pillow reads
Image.MAX_IMAGE_PIXELS = None  # the limits of the caller apply instead


class DamagedImage(Exception):
    """An image cannot be decoded."""


class ImageTooLarge(Exception):
    """An image has too many pixels, or none.

    Attributes:
        size: width and height in pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(size)
        self.size = size


def decode(data: bytes, *, max_side: int, max_pixels: int) -> NDArray[np.uint8]:
    """(height, width, 3) the first picture of a file, upright, in RGB without transparency.

    Args:
        max_side: most pixels of width and height.
        max_pixels: most pixels of the picture.

    Raises:
        DamagedImage: it is incomplete, damaged, or needs more memory than this process may take.
        ImageTooLarge: it exceeds the limits.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            sides_fit = 0 < min(width, height) <= max(width, height) <= max_side
            if not sides_fit or width * height > max_pixels:
                raise ImageTooLarge(image.size)
            image.load()
            with suppress(Exception):  # a picture whose EXIF is damaged is shown as it is stored
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            return np.array(image.convert("RGB"))
    except ImageTooLarge:
        raise
    except Exception as error:  # whatever Pillow's parsers raise
        raise DamagedImage from error
