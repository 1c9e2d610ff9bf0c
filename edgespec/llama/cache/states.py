"""Keys and values on disk, so that a sequence that was read once need not be read again.

A sequence's state is saved in blocks of `BLOCK` tokens, with a shorter one at its end, and longer ones where
they would end within an image. A block's file is named by a hash over everything its bits depend on: the
model, the build, the settings, and every token up to its end. So any block that is found is valid, sequences
with the same beginning share blocks, and there is no index to maintain. Models with a recurrent state have
one block for the whole sequence.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from edgespec.errors import BackendError, DeviceLostError, DeviceMemoryError, WorkerError
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.runtime.backend import build_identity
from edgespec.llama.runtime.context import NoRoomInCache
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.types import GGUFHeader

BLOCK = 128  # tokens

_SUFFIX = ".kv"


class SavedState(Protocol):
    """Something from which sequences are restored."""

    def restore(self, cache: KVCache, tokens: Sequence[int]) -> int:
        """Extend the cache, which holds a prefix of `tokens`; returns how many tokens it holds then."""


@dataclass(frozen=True)
class _StateBlock:
    """The tokens start .. end - 1 of a sequence, and the name of their file."""

    start: int
    end: int
    name: str

    @property
    def is_whole(self) -> bool:
        return self.end - self.start >= BLOCK


def block_borders(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The tokens start .. end - 1 of each block; none ends among those of images, which are below zero."""
    start = 0
    while start < len(tokens):
        end = min(start + BLOCK, len(tokens))
        while end < len(tokens) and tokens[end - 1] < 0 and tokens[end] < 0:
            end += 1
        yield start, end
        start = end


class StateStore:
    """The states of sequences in files.

    Args:
        files: where they are.
        identity: everything but the tokens that the bits depend on.
    """

    def __init__(self, files: CheckedFiles, identity: str) -> None:
        self._files = files
        self._seed = hashlib.blake2b(identity.encode(), digest_size=16).digest()

    @property
    def failure(self) -> str:
        """The reason why the last write failed; empty if it did not."""
        return self._files.failure

    def restore(self, cache: KVCache, tokens: Sequence[int]) -> int:
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
            state = self._files.read(block.name)
            if state is None:
                break
            try:
                cache.restore((ctypes.c_uint8 * len(state)).from_buffer(state), block.end - block.start)
            except NoRoomInCache:
                break
            except (DeviceLostError, DeviceMemoryError, WorkerError):
                raise  # the file is not at fault
            except BackendError:
                self._files.discard(block.name)
                break
        self._files.used([block.name for block in found])
        return cache.length

    def save(self, cache: KVCache, tokens: Sequence[int], *, tail: bool) -> None:
        """Write the blocks of the sequence in the cache that are not on disk yet.

        Args:
            tokens: the sequence in the cache.
            tail: also write the tokens after the last whole block.
        """
        for _ in self.saving(cache, tokens, tail=tail):
            pass

    def saving(self, cache: KVCache, tokens: Sequence[int], *, tail: bool) -> Iterator[None]:
        """As `save`, with a step for each block that is written; the sequence must not change in between."""
        parts = cache.saves_parts
        blocks = [block for block in self._blocks(tokens, parts) if tail or (parts and block.is_whole)]
        for block in blocks:
            if self._files.is_resting:
                return
            if not self._files.has(block.name):
                self._files.write(block.name, memoryview(cache.save(block.start, block.end)))
                yield
        self._files.used([block.name for block in blocks])

    def prune(self, tokens: Sequence[int], *, parts: bool) -> None:
        """Remove every block that does not belong to this sequence."""
        kept = {block.name for block in self._blocks(tokens, parts)}
        for name in self._names() - kept:
            self._files.discard(name)

    def clear(self) -> None:
        """Remove all blocks."""
        for name in self._names():
            self._files.discard(name)

    def _blocks(self, tokens: Sequence[int], parts: bool) -> Iterator[_StateBlock]:
        name = self._seed
        whole = [(0, len(tokens))] if tokens else []
        for start, end in block_borders(tokens) if parts else whole:
            name = hashlib.blake2b(name + array("i", tokens[start:end]).tobytes(), digest_size=16).digest()
            yield _StateBlock(start, end, f"{name.hex()}-{end - start}{_SUFFIX}")

    def _longest_chain(self, tokens: Sequence[int], parts: bool) -> list[_StateBlock]:
        names = self._names()
        if not parts:
            lengths = {length for name in names if 0 < (length := _length(name)) <= len(tokens)}
            sequences = (tokens[:length] for length in sorted(lengths, reverse=True))
            wholes = (block for sequence in sequences for block in self._blocks(sequence, parts=False))
            return [block for block in wholes if block.name in names][:1]
        chain: list[_StateBlock] = []
        for block in self._blocks(tokens, parts=True):
            if block.name not in names:
                return chain + self._shorter(tokens, block, chain, names)
            chain.append(block)
        return chain

    def _shorter(
        self, tokens: Sequence[int], missing: _StateBlock, chain: list[_StateBlock], names: set[str]
    ) -> list[_StateBlock]:
        """The longest block that begins where a missing one does, in a list of at most one."""
        before = bytes.fromhex(chain[-1].name.partition("-")[0]) if chain else self._seed
        for end in range(missing.end - 1, missing.start, -1):
            data = before + array("i", tokens[missing.start : end]).tobytes()
            name = hashlib.blake2b(data, digest_size=16).hexdigest() + f"-{end - missing.start}{_SUFFIX}"
            if name in names:
                return [_StateBlock(missing.start, end, name)]
        return []

    def _names(self) -> set[str]:
        return {name for name in self._files.names() if name.endswith(_SUFFIX)}


def _length(name: str) -> int:
    return int(name.removesuffix(_SUFFIX).partition("-")[2])


def cache_identity(header: GGUFHeader, model: Model, **settings: object) -> dict[str, str]:
    """The model, its weights, the llama.cpp build with its CPU features, and `settings`.

    The weights are identified by the states of their files (see files.state), so any write to one of them
    gives another identity. So does copying, moving or touching the model: its texts are then read again. The
    alternative, a hash over all weights, would mean reading all of the files before the first answer.
    """
    return {
        "model": f"{header.path.name} {header.fingerprint}",
        "weights": ", ".join(map(str, model.states)),
        "build": build_identity(),
        **{name: str(value) for name, value in settings.items()},
    }


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
                try:
                    self._file.seek(at)
                    state = self._file.read(end - at)
                    if zlib.crc32(state) != checksum:
                        break
                    cache.rewind(start)
                    cache.restore((ctypes.c_uint8 * len(state)).from_buffer_copy(state), last - start)
                except (DeviceLostError, WorkerError):
                    raise  # the file is not at fault
                except (NoRoomInCache, BackendError, OSError):
                    break
            at = end
        return cache.length

    def close(self) -> None:
        """Free the space on disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
