"""Formats of images: what a file says of its picture, and whether the file is whole.

llama.cpp's decoder fills what is missing at the end of a file with grey or black, takes no notice of
checksums, and shows photographs as the camera's sensor saw them, however the camera was held.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

BMP_HEADER = 14  # bytes before the size of the second header
_PNG, _BMP, _JPEG = b"\x89PNG\r\n\x1a\n", b"BM", b"\xff\xd8\xff"
_GIFS = (b"GIF87a", b"GIF89a")
_MAX_BLOCKS = 1 << 18  # of a file: 32 MiB of a GIF's largest have fewer

_NO_LENGTH = {0x01, *range(0xD0, 0xD9)}  # JPEG markers that nothing belongs to
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that begin a picture
_SCAN, _END, _EXIF_SEGMENT = 0xDA, 0xD9, 0xE1  # further ones
_AFTER_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_EXIF = b"Exif\0\0"
_ORIENTATION, _SHORT = 0x0112, 3  # a tag of EXIF, and its type
_STORED_PLAINLY = (0, 3)  # compressions of a BMP that store pixels as they are


class IncompleteImage(Exception):
    """A file ends before its picture does."""


class DamagedImage(Exception):
    """A file is no picture in spite of its first bytes."""


@dataclass(frozen=True)
class Picture:
    """The size and orientation of a picture, as its file states them.

    Attributes:
        width, height: in pixels, as they are stored.
        orientation: how the picture is to be turned, as EXIF counts: 1 leaves it as it is stored.
    """

    width: int
    height: int
    orientation: int = 1


def media_type(data: bytes) -> str:
    """The media type of an image; empty if its format is not known."""
    return next((kind for begin, kind in _MEDIA_TYPES.items() if data.startswith(begin)), "")


def begins_like_image(data: bytes) -> bool:
    """True if the first bytes are those of a format that can be read."""
    if data.startswith(_BMP):  # so do some texts
        return data[BMP_HEADER + 1 : BMP_HEADER + 4] == b"\0\0\0"
    return bool(media_type(data))


def read_picture(data: bytes) -> Picture | None:
    """Read the size and orientation of a whole picture; None if its format is not known.

    Raises:
        IncompleteImage: the file ends too early.
        DamagedImage: it contradicts itself.
    """
    read = _READERS.get(media_type(data))
    try:
        return None if read is None else read(data)
    except (struct.error, IndexError):
        raise IncompleteImage from None


def orientation_of(data: bytes) -> int:
    """The orientation of a picture, as EXIF counts; 1 if it is not known."""
    try:
        picture = read_picture(data)
    except (IncompleteImage, DamagedImage):
        return 1
    return 1 if picture is None else picture.orientation


def _read_png(data: bytes) -> Picture:
    width, height = struct.unpack_from(">II", data, len(_PNG) + 8)
    orientation, at = 1, len(_PNG)
    for _ in range(_MAX_BLOCKS):
        length, kind = struct.unpack_from(">I4s", data, at)
        at += 8
        (checksum,) = struct.unpack_from(">I", data, at + length)
        content = memoryview(data)[at : at + length]
        if zlib.crc32(content, zlib.crc32(kind)) != checksum:
            raise DamagedImage
        if kind == b"IEND":
            return Picture(width, height, orientation)
        if kind == b"eXIf":
            orientation = _orientation(bytes(content))
        at += length + 4
    raise DamagedImage


def _read_gif(data: bytes) -> Picture:
    """Read the first picture of an animation."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colours(flags)
    for _ in range(_MAX_BLOCKS):
        kind = data[at]
        if kind == ord("!"):
            at = _behind_blocks(data, at + 2)
        elif kind == ord(","):
            _behind_blocks(data, at + 11 + _colours(data[at + 9]))
            return Picture(width, height)
        else:
            break
    raise DamagedImage


def _colours(flags: int) -> int:
    """The bytes of a GIF's table of colours."""
    return 3 << (1 + (flags & 7)) if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    """The place behind the blocks of a GIF that begin there, the last of which is empty."""
    for _ in range(_MAX_BLOCKS):
        length = data[at]
        at += 1 + length
        if not length:
            return at
    raise DamagedImage


def _read_bmp(data: bytes) -> Picture:
    begin, header = struct.unpack_from("<II", data, BMP_HEADER - 4)
    compression = 0
    if header == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, BMP_HEADER + 4)
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, BMP_HEADER + 4)
    height = abs(height)  # rows may be stored from the top
    row = (max(width, 0) * bits + 31) // 32 * 4
    if compression in _STORED_PLAINLY and begin + row * height > len(data):
        raise IncompleteImage
    return Picture(width, height)


def _read_jpeg(data: bytes) -> Picture:
    found, orientation = None, 1
    for marker, content in _segments(data):
        if marker in _FRAMES and found is None:
            height, width = struct.unpack_from(">HH", content, 1)
            found = width, height
        if marker == _EXIF_SEGMENT and bytes(content[: len(_EXIF)]) == _EXIF:
            orientation = _orientation(bytes(content[len(_EXIF) :]))
    if found is None:
        raise DamagedImage
    return Picture(*found, orientation)


def _segments(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """The markers of a JPEG up to its end, with what belongs to them; without the pixels."""
    at = 2
    for _ in range(_MAX_BLOCKS):
        at = data.find(b"\xff", at)
        if at < 0:
            raise IncompleteImage
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker == _END:
            return
        if marker in _NO_LENGTH:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        yield marker, memoryview(data)[at + 2 : at + length]
        at += length
        if marker == _SCAN:
            after = _AFTER_SCAN.search(data, at)
            if after is None:
                raise IncompleteImage
            at = after.start()
    raise DamagedImage


def _orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF; 1 if it states none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == _ORIENTATION and kind == _SHORT:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_MEDIA_TYPES = {
    _PNG: "image/png", _JPEG: "image/jpeg", _GIFS[0]: "image/gif", _GIFS[1]: "image/gif", _BMP: "image/bmp"
}  # fmt: skip
_READERS: Mapping[str, Callable[[bytes], Picture]] = {
    "image/png": _read_png, "image/jpeg": _read_jpeg, "image/gif": _read_gif, "image/bmp": _read_bmp
}  # fmt: skip
