"""A cursor over the bytes of a GGUF header, which checks its bounds before it reads."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

from edgespec.errors import ModelFileError

# Metadata value type id -> (name, struct format of one value). Strings and arrays have none.
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    8: ("string", ""),
    9: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
SCALARS = {type_id: struct.Struct("<" + code) for type_id, (_, code) in VALUE_TYPES.items() if code}
UINT32, STRING, ARRAY, UINT64, INT64 = 4, 8, 9, 10, 11

# Large vocabularies have 2.6e5 tokens and 30 MB of header. This bounds the work on a sparse file, whose size
# would justify any count.
MAX_HEADER_BYTES = 256 * 2**20

DOWNLOAD_AGAIN = "Download the file again."


class IncompleteHeader(Exception):
    """The available bytes end before the header does.

    Attributes:
        needed: bytes from the file's start that are needed at least.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class Cursor:
    """A position in a mapped file, or in its beginning.

    Args:
        path: what the file is called in messages.
        size: of the whole file; None if `data` is all of it.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int | None = None) -> None:
        self.path = path
        self.data = data
        self.size = len(data) if size is None else size
        self.at = 0

    def name(self, where: str) -> str:
        try:
            return self.bytes(where).decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"{where} is not UTF-8")

    def bytes(self, where: str) -> bytes:
        length = int(self.scalar(UINT64, where))
        start = self.at
        self.advance(length, where)
        return self.data[start : self.at]

    def scalar(self, type_id: int, where: str) -> Any:
        layout = SCALARS[type_id]
        start = self.at
        self.advance(layout.size, where)
        return layout.unpack_from(self.data, start)[0]

    def advance(self, count: int, where: str) -> None:
        end = self.at + count
        self.require_size(end, where)
        if end > MAX_HEADER_BYTES:
            self.damaged(f"{where} makes its header longer than {MAX_HEADER_BYTES >> 20} MiB")
        if end > len(self.data):
            raise IncompleteHeader(end)
        self.at = end

    def require_size(self, needed: int, where: str) -> None:
        if needed > self.size:
            raise ModelFileError(
                f"{self.path} is cut short or damaged: it has {self.size:,} bytes, "
                f"but its header requires at least {needed:,} ({where}).",
                DOWNLOAD_AGAIN,
            )

    def damaged(self, why: str) -> NoReturn:
        raise ModelFileError(f"{self.path} is damaged: {why}.", DOWNLOAD_AGAIN)
