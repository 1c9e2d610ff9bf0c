"""The weights that a packed file was made from, and whether a model's files still hold them.

Two fine-tunes of one base differ only in their weights, and a file may be rewritten in place. So a packed
file keeps a hash over all bytes of each layer it was made from, and the states (see files.state) of their
files. As long as a file's state is the same, so is its content, and nothing needs to be read. A copy, or a
file that was moved or touched, is read and hashed once; its state is then noted next to the packed file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK
from edgespec.files.small_json import read_json, save_json
from edgespec.files.state import FileState, states_of
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.offload.layout import PIECE_BYTES, pieces, round_up

_N_READERS = 4
_MAX_STATES = 16  # copies of a model to remember

States = tuple[FileState, ...]


@dataclass(frozen=True)
class Sources:
    """The origin of a packed file."""

    hashes: Mapping[int, str]  # layer to the hash of its weights in the model's files
    # known states of model files with these weights, a tuple for each copy of the model
    states: tuple[States, ...]
    note: Path | None = None  # the file in which further states are noted

    def fit(
        self, files: ModelFiles, on_progress: Callable[[float], None], layers: Sequence[Layer] | None = None
    ) -> bool:
        """True if these files hold the weights; reads them if their state is new.

        Args:
            layers: the model's, with their weights in the order in which they were packed; None for the
                files' order.

        Raises:
            StreamError: they cannot be read, or change while they are read.
        """
        now = current_states(files)
        if now in self.states:
            return True
        settled = all(state.settled for state in now)
        packed = [layer for layer in layers or files.layers() if layer.index in self.hashes]
        if not _same_weights(files, packed, self.hashes, on_progress):
            return False
        check_unchanged(files, now)
        if settled:
            self._remember(now)
        return True

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for the packed file's index."""
        return {
            "hashes": {str(layer): digest for layer, digest in self.hashes.items()},
            "states": [[str(state) for state in states] for states in self.states],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Sources:
        """Restore from the packed file's index.

        Raises:
            ValueError, KeyError, TypeError: the record is malformed.
        """
        hashes = {int(layer): str(digest) for layer, digest in record["hashes"].items()}
        return cls(hashes, _states(record["states"]))

    def _remember(self, states: States) -> None:
        if self.note is None:
            return
        known = [*self.states, states][-_MAX_STATES:]
        save_json(self.note, replace(self, states=tuple(known)).to_json())


def recall_sources(pack: Path, made_from: Sources) -> Sources:
    """Return a packed file's origin, with the states that have been noted for it since."""
    note = pack.with_name(f"{pack.name}.sources")
    noted = read_json(note, Sources.from_json) or made_from
    # A note may be about an earlier packed file of the same name.
    states = noted.states if noted.hashes == made_from.hashes else ()
    return replace(made_from, states=(*made_from.states, *states), note=note)


def current_states(files: ModelFiles) -> States:
    """The states of a model's files.

    Raises:
        StreamError: one no longer exists.
    """
    try:
        return states_of(files.paths)
    except OSError as error:
        raise StreamError(
            f"Reading '{error.filename}' failed: {error.strerror}.",
            "Check the path, and load the model again.",
        ) from error


def check_unchanged(files: ModelFiles, states: States) -> None:
    """Raise if files were written to or replaced since they were in these states.

    Raises:
        StreamError: one was, or no longer exists.
    """
    for path, before, now in zip(files.paths, states, current_states(files), strict=True):
        if before != now:
            raise StreamError(
                f"'{path}' was changed while it was being read.",
                "Wait until its download or copy has finished, then load the model again.",
            )


def header_fingerprint(files: ModelFiles) -> str:
    """32 hex digits over the headers and sizes of a model's files."""
    named = " ".join(f"{header.fingerprint} {header.file_bytes}" for header in files.headers)
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def _states(rows: list[list[str]]) -> tuple[States, ...]:
    return tuple(tuple(FileState(*(int(number) for number in text.split())) for text in row) for row in rows)


def _same_weights(
    files: ModelFiles,
    layers: Sequence[Layer],
    hashes: Mapping[int, str],
    on_progress: Callable[[float], None],
) -> bool:
    """True if the layers have these hashes; reads until one differs."""
    total = sum(layer.n_bytes for layer in layers)
    done, differs, lock = 0, threading.Event(), threading.Lock()
    readers = [FileReader(path) for path in files.paths]

    def report(n_bytes: int) -> None:
        nonlocal done
        with lock:
            done += n_bytes

    def check(layer: Layer) -> None:
        if not differs.is_set() and _hash_of(layer, readers, report, differs) != hashes[layer.index]:
            differs.set()

    try:
        with ThreadPoolExecutor(_N_READERS) as pool:
            jobs = [pool.submit(check, layer) for layer in layers]
            try:
                for job in jobs:
                    while not _done_within(job, 0.2):
                        on_progress(done / total)
                    on_progress(done / total)
            except BaseException:
                differs.set()  # stops the other threads
                raise
    finally:
        for reader in readers:
            reader.close()
    return not differs.is_set()


def _done_within(job: Future[None], seconds: float) -> bool:
    try:
        job.result(seconds)
    except TimeoutError:
        if job.done():
            raise
        return False
    return True


def _hash_of(
    layer: Layer, readers: list[FileReader], report: Callable[[int], None], stop: threading.Event
) -> str:
    """The hash of one layer, which is read piece by piece."""
    digest = xxhash.xxh3_128()
    with contextlib.closing(mmap.mmap(-1, PIECE_BYTES)) as scratch, memoryview(scratch) as memory:
        for tensor in layer.tensors:
            start = tensor.offset // BLOCK * BLOCK
            end = tensor.offset + tensor.n_bytes
            for piece in pieces(tensor.file, start, 0, round_up(end - start, BLOCK)):
                if stop.is_set():
                    return ""
                with memory[: piece.n_bytes] as part:
                    readers[tensor.file].read_into([part], piece.offset)
                first, last = max(tensor.offset - piece.offset, 0), min(end - piece.offset, piece.n_bytes)
                with memory[first:last] as part:
                    digest.update(part)
            report(tensor.n_bytes)
    return digest.hexdigest()
