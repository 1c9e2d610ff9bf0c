"""Keys and values on disk, so that a text that was read once need not be read again.

A text's state is saved in blocks of `BLOCK` tokens, with a shorter one at its end. A block's file is named by
a
hash over everything its bits depend on: the model, the build, the settings, and every token up to its end. So
any block that is found is valid, texts with the same beginning share blocks, and there is no index to
maintain. Models with a recurrent state have one block for the whole text.

Files are written atomically and checked when they are read; a damaged one counts as missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import BackendError
from edgespec.files.kept import Kept
from edgespec.files.writing import atomic_write
from edgespec.models.llama.cache.text_cache import TextCache
from edgespec.models.llama.runtime.context import NoRoomInCache

BLOCK = 128  # tokens

_MAGIC = b"EDGEKV01"
_CHECKSUM_BYTES = 4
_SUFFIX = ".kv"
_UNFINISHED = ".part"
_ABANDONED_S = 3600.0
_PROMPTS_BYTES = 8 << 30


@dataclass(frozen=True)
class _Block:
    """The tokens start .. end - 1 of a text, and the name of their file."""

    start: int
    end: int
    name: str


class StateStore:
    """The states of texts in a folder.

    Args:
        folder: where the files are; created when the first one is written.
        identity: everything but the tokens that the bits depend on.
        limit: most bytes in the folder; the least recently used blocks are removed first.

    Attributes:
        failure: why nothing can be written here; empty if nothing has failed.
    """

    def __init__(self, folder: Path, identity: str, limit: int | None = None) -> None:
        self.folder = folder
        self.failure = ""
        self._seed = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self._limit = limit
        self._written: set[str] = set()

    def restore(self, cache: TextCache, tokens: Sequence[int]) -> int:
        """Extend the cache, which holds a prefix of `tokens`, as far as there are files.

        Returns:
            How many tokens the cache holds now: no fewer than before, unless a file turns out to be damaged.
        """
        found = self._longest_chain(tokens, cache.saves_parts)
        if not found or found[-1].end <= cache.length:
            return cache.length
        for block in found:
            if block.end <= cache.length:
                continue
            cache.rewind(block.start)
            state = self._read(block)
            if state is None:
                break
            try:
                cache.restore(state, block.end - block.start)
            except NoRoomInCache:
                break
            except BackendError:
                self._discard(block.name)
                break
        return cache.length

    def keep(self, cache: TextCache, tokens: Sequence[int], *, tail: bool) -> None:
        """Write the blocks of the text in the cache that are not on disk yet.

        Args:
            tokens: the text in the cache.
            tail: also write the tokens after the last whole block.
        """
        for block in self._blocks(tokens, cache.saves_parts):
            whole = cache.saves_parts and block.end - block.start == BLOCK
            if block.name not in self._written and (whole or tail):
                if not (self.folder / block.name).exists():
                    self._write(block, cache)
                self._written.add(block.name)

    def prune(self, tokens: Sequence[int], *, parts: bool) -> None:
        """Remove every block that does not belong to this text."""
        kept = {block.name for block in self._blocks(tokens, parts)}
        for name in self._names() - kept:
            self._discard(name)

    def _blocks(self, tokens: Sequence[int], parts: bool) -> Iterator[_Block]:
        name = self._seed
        step = BLOCK if parts else max(len(tokens), 1)
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            name = hashlib.blake2b(name + array("i", piece).tobytes(), digest_size=16).digest()
            yield _Block(start, start + len(piece), f"{name.hex()}-{len(piece)}{_SUFFIX}")

    def _longest_chain(self, tokens: Sequence[int], parts: bool) -> list[_Block]:
        names = self._names()
        if not parts:
            lengths = {length for name in names if 0 < (length := _length(name)) <= len(tokens)}
            texts = (tokens[:length] for length in sorted(lengths, reverse=True))
            wholes = (block for text in texts for block in self._blocks(text, parts=False))
            return [block for block in wholes if block.name in names][:1]
        chain: list[_Block] = []
        for block in self._blocks(tokens, parts=True):
            if block.name not in names:
                return chain + self._shorter(tokens, block, chain, names)
            chain.append(block)
        return chain

    def _shorter(
        self, tokens: Sequence[int], missing: _Block, chain: list[_Block], names: set[str]
    ) -> list[_Block]:
        """The longest block that begins where a missing one does, in a list of at most one."""
        before = bytes.fromhex(chain[-1].name.partition("-")[0]) if chain else self._seed
        for end in range(missing.end - 1, missing.start, -1):
            data = before + array("i", tokens[missing.start : end]).tobytes()
            name = hashlib.blake2b(data, digest_size=16).hexdigest() + f"-{end - missing.start}{_SUFFIX}"
            if name in names:
                return [_Block(missing.start, end, name)]
        return []

    def _names(self) -> set[str]:
        try:
            return {name for name in os.listdir(self.folder) if name.endswith(_SUFFIX)}  # noqa: PTH208
        except OSError:
            return set()

    def _read(self, block: _Block) -> ctypes.Array[ctypes.c_uint8] | None:
        path = self.folder / block.name
        head = len(_MAGIC) + _CHECKSUM_BYTES
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size - head
                start = file.read(head)
                state = (ctypes.c_uint8 * max(size, 0))()
                whole = file.readinto(memoryview(state)) == size
            if whole and start == _MAGIC + zlib.crc32(memoryview(state)).to_bytes(4, "little"):
                os.utime(path)  # the least recently used are removed first
                return state
        except OSError:
            pass
        self._discard(block.name)
        return None

    def _write(self, block: _Block, cache: TextCache) -> None:
        if self.failure:
            return
        if not self._written:
            self._sweep()
        state = memoryview(cache.save(block.start, block.end)).cast("B")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(len(state))
            path = self.folder / block.name
            with atomic_write(path, durable=False, suffix=_UNFINISHED) as file:
                file.write(_MAGIC + zlib.crc32(state).to_bytes(4, "little"))
                file.write(state)
        except OSError as error:
            self.failure = f"{self.folder} cannot be written: {error.strerror}"

    def _make_room(self, size: int) -> None:
        if self._limit is None:
            return
        files = []
        for name in self._names():
            with contextlib.suppress(OSError):
                status = (self.folder / name).stat()
                files.append((status.st_mtime_ns, status.st_size, name))
        total = sum(bytes_ for _, bytes_, _ in files) + size
        for _, bytes_, name in sorted(files):
            if total <= self._limit:
                return
            self._discard(name)
            total -= bytes_

    def _sweep(self) -> None:
        """Remove what killed writers have left behind."""
        for path in self.folder.glob("*" + _UNFINISHED):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()

    def _discard(self, name: str) -> None:
        self._written.discard(name)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()


def _length(name: str) -> int:
    return int(name.removesuffix(_SUFFIX).partition("-")[2])


def prompt_store(identity: Mapping[str, str]) -> StateStore:
    """The store of all models' prompts in the user's cache folder, limited in size."""
    return StateStore(Kept.PROMPTS.folder, repr(sorted(identity.items())), limit=_PROMPTS_BYTES)
