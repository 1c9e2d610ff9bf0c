"""The state of a sequence that waits for room in the cache, in a file without a name."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.cache.states import block_borders
from edgespec.llama.runtime.context import NoRoomInCache


class StateFile:
    """The state of one sequence on disk, until `close` or the end of the program, however that ends.

    What the disk has no room for is left out, and has to be computed again.

    Args:
        folder: decides which disk holds the state; no more than half of what is free there is taken.
        cache: of a kind that saves parts of sequences.
        tokens: the sequence in the cache.
    """

    def __init__(self, folder: Path, cache: KVCache, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._checksums: list[tuple[int, int]] = []  # of each block, and where it ends in the file
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            room = shutil.disk_usage(folder).free // 2
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            for start, last in block_borders(tokens):
                state = memoryview(cache.save(start, last)).cast("B")
                room -= len(state)
                if room < 0 or self._file.write(state) < len(state):
                    return
                self._checksums.append((zlib.crc32(state), self._file.tell()))

    @property
    def closed(self) -> bool:
        """True if nothing is left on disk."""
        return self._file is None

    def restore(self, cache: KVCache, tokens: Sequence[int]) -> int:
        """Extend the cache, which holds a prefix of `tokens`; returns how many tokens it holds then."""
        if self._file is None or list(tokens[: len(self._tokens)]) != self._tokens:
            return cache.length
        at = 0
        blocks = block_borders(self._tokens)
        for (checksum, end), (start, last) in zip(self._checksums, blocks, strict=False):
            if last > cache.length:
                self._file.seek(at)
                state = self._file.read(end - at)
                if zlib.crc32(state) != checksum:
                    break
                cache.rewind(start)
                try:
                    cache.restore((ctypes.c_uint8 * len(state)).from_buffer_copy(state), last - start)
                except NoRoomInCache:
                    break
            at = end
        return cache.length

    def close(self) -> None:
        """Free the space on disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
