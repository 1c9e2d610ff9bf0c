"""Files that grow by blocks: whatever ends the program, the blocks that were written before are kept.

A block is its length and its CRC-32 (little-endian, 4 bytes each), and then its bytes. Reading ends at the
first block that is not whole, and the next one that is added replaces it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEAD = struct.Struct("<II")


class BlockFile:
    """A file of blocks.

    Args:
        label: what the blocks belong to, as the first block. A file with another label is begun anew.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, label: bytes) -> None:
        self._path = path
        self._end = 0
        blocks = self._read() if path.exists() else iter(())
        if next(blocks, None) == label:
            for _ in blocks:
                pass
        else:
            self._end = 0
            self.append(label)

    def blocks(self) -> Iterator[bytes]:
        """The blocks, without the label."""
        blocks = self._read()
        next(blocks, None)
        yield from blocks

    def append(self, block: bytes) -> None:
        """Add a block, and wait until it is on disk.

        Raises:
            OSError: it cannot be written; the blocks before are still there.
        """
        mode = "r+b" if self._path.exists() else "w+b"
        with self._path.open(mode) as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(_HEAD.pack(len(block), zlib.crc32(block)) + block)
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()

    def _read(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            self._end = 0
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                if length > self._path.stat().st_size:
                    return
                block = file.read(length)
                if len(block) < length or zlib.crc32(block) != checksum:
                    return
                self._end = file.tell()
                yield block
