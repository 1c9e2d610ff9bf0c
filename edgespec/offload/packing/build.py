"""Writing the packed layer file of a model."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import xxhash

from edgespec.base.option import named
from edgespec.errors import OutputError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK, drop_cached
from edgespec.files.writing import atomic_large_write
from edgespec.kernels.ggml import address_of_map
from edgespec.kernels.layouts import KernelLayout, weight_layout
from edgespec.llama.runtime.backend import build_identity
from edgespec.models.gguf.experts import LayerExperts, LayerWeights
from edgespec.models.gguf.layers import FileTensor, Layer, ModelFiles
from edgespec.offload.layout import EXPERT_PIECE_BYTES, PIECE_BYTES, Home, Store, pieces, round_up
from edgespec.offload.packing.division import Divider, divide
from edgespec.offload.packing.index import HEAD, MAGIC, VERSION, part_path
from edgespec.offload.packing.pack import (
    PART_HEAD,
    piece_sizes,
    record_places,
    stack_layout,
    store_of,
    tensor_places,
)
from edgespec.offload.packing.sources import (
    Sources,
    check_unchanged,
    current_states,
    header_fingerprint,
)

_SYNC_EVERY = 256 << 20


def build_pack(
    path: Path,
    files: ModelFiles,
    layers: tuple[Layer, ...],
    on_progress: Callable[[float], None] | None = None,
    experts: tuple[LayerExperts, ...] = (),
    rates: Mapping[Path, float] | None = None,
) -> Store:
    """Write the packed file of a model, replacing an existing one.

    Args:
        rates: folders for its parts, with the bytes per second that the disk of each reads; none keeps
            everything in one file.
        experts: those that are to be read one by one, which are not among the layers' weights.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    states = current_states(files)
    settled = all(state.settled for state in states)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(atomic_large_write(path, partial))  # the last to be renamed
            parts = {part_path(path, folder): rate for folder, rate in (rates or {}).items()}
            outputs = [
                stack.enter_context(
                    atomic_large_write(part, part.with_name(f"{part.name}.{os.getpid()}.partial"))
                )
                for part in parts
            ] or [file]
            token = os.urandom(16)
            divider = Divider([*parts.values()] or [1.0])
            sizes = divide(piece_sizes(layers, experts), [*parts.values()] or [1.0])
            for output, n_bytes in zip(outputs, sizes, strict=True):
                _reserve(output, BLOCK + n_bytes)
                output.write(PART_HEAD.pack(MAGIC, token).ljust(BLOCK, b"\0"))
            report = on_progress or (lambda _fraction: None)
            with _PackWriter(outputs, divider, bool(parts), files, layers, experts, report) as writer:
                index = writer.write()
            if parts:
                file.write(bytes(BLOCK))
                for output in outputs:
                    _flush(output)
                index["token"] = token.hex()
                index["parts"] = [
                    {"path": str(part), "n_bytes": BLOCK + n} for part, n in zip(parts, sizes, strict=True)
                ]
            sources = Sources(index.pop("hashes"), (states,) if settled else ())
            check_unchanged(files, states)
            names = {"model": header_fingerprint(files), "build": build_identity()}
            _write_index(file, {**names, "sources": sources.to_json(), **index})
        for folder in (*(rates or ()), path.parent):
            _sync_folder(folder)
    except OSError as error:
        raise cannot_write(path, error) from error
    return store_of(path, index)


def cannot_write(path: Path, error: OSError) -> OutputError:
    """The error for a packed file that the system refuses to write."""
    return OutputError(
        f"The packed layer file '{_whole_name(error.filename or path)}' cannot be written: "
        f"{error.strerror or error}.",
        f"Free some disk space, or use {named('pack', 'never')}.",
    )


def _whole_name(path: Path | str) -> Path:
    """The name that a partial file was to get."""
    return Path(path).with_suffix("").with_suffix("") if str(path).endswith(".partial") else Path(path)


def _reserve(file: IO[bytes], n_bytes: int) -> None:
    """Notice a full disk before the work begins."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as error:
        import errno

        error.filename = file.name
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # other errors only mean that this file system cannot reserve space


class _PackWriter:
    """Writes layers, and the records of their experts behind each."""

    def __init__(
        self,
        outputs: Sequence[IO[bytes]],
        divider: Divider,
        spread: bool,
        files: ModelFiles,
        layers: Sequence[Layer],
        experts: Sequence[LayerExperts],
        on_progress: Callable[[float], None],
    ) -> None:
        self._outputs = outputs
        self._spread = spread
        self._divider = divider
        self._ends = [BLOCK] * len(outputs)
        self._layers = {layer.index: layer for layer in layers}
        self._experts = {found.index: found for found in experts}
        self._on_progress = on_progress
        self._total = LayerWeights(tuple(layers), tuple(experts)).n_bytes
        self._done = 0
        self._unsynced = 0
        self._kernels: dict[str, str] = {}
        self._flushers = [_Flusher(output) for output in outputs]
        self._weights = _ReadAhead(files, list(self._in_order()))

    def _in_order(self) -> Iterator[FileTensor]:
        """The matrices in the order in which they are written."""
        for number in self._numbers:
            if number in self._layers:
                yield from self._layers[number].tensors
            if number in self._experts:
                for expert in range(self._experts[number].n_experts):
                    yield from self._experts[number].parts(expert)

    @property
    def _numbers(self) -> list[int]:
        return sorted({*self._layers, *self._experts})

    def write(self) -> dict[str, Any]:
        """Write everything; returns the index."""
        stored: list[dict[str, Any]] = []
        records: list[dict[str, Any]] = []
        hashes: dict[int, str] = {}
        for number in self._numbers:
            source = xxhash.xxh3_128()
            if number in self._layers:
                stored.append({"index": number, **self._write_layer(self._layers[number], source)})
            if number in self._experts:
                records.append({"index": number, **self._write_experts(self._experts[number], source)})
            hashes[number] = source.hexdigest()
        index = {"piece_bytes": PIECE_BYTES, "kernels": self._kernels, "layers": stored, "hashes": hashes}
        return {**index, "experts": records} if records else index

    def _write_layer(self, layer: Layer, source: xxhash.xxh3_128) -> dict[str, Any]:
        places, n_bytes = tensor_places(layer)
        layouts = {t.name: weight_layout(t.name, t.type_id, t.shape) for t in layer.tensors}
        written = self._write_unit(layer.tensors, layouts, places, n_bytes, PIECE_BYTES, source)
        return self._record(n_bytes, places, written.checksums, written.homes, written.homes[0][1])

    def _record(
        self, n_bytes: int, places: Mapping[str, int], checksums: Any, homes: Any, offset: int
    ) -> dict[str, Any]:
        record = {"offset": offset, "n_bytes": n_bytes, "places": places, "checksums": checksums}
        return {**record, "homes": homes} if self._spread else record

    def _write_experts(self, experts: LayerExperts, source: xxhash.xxh3_128) -> dict[str, Any]:
        places, n_bytes = record_places(experts)
        layouts = {stack.name: stack_layout(stack) for stack in experts.tensors}
        written = [
            self._write_unit(experts.parts(expert), layouts, places, n_bytes, EXPERT_PIECE_BYTES, source)
            for expert in range(experts.n_experts)
        ]
        checksums, homes = [unit.checksums for unit in written], [unit.homes for unit in written]
        return self._record(n_bytes, places, checksums, homes, homes[0][0][1])

    def _write_unit(
        self,
        tensors: Iterable[FileTensor],
        layouts: Mapping[str, KernelLayout | None],
        places: Mapping[str, int],
        n_bytes: int,
        piece_bytes: int,
        source: xxhash.xxh3_128,
    ) -> _PieceWriter:
        """Write what is read together; returns the writer, with the places and checksums of its pieces."""
        writer = _PieceWriter(self._next_home, n_bytes, piece_bytes)
        for tensor in tensors:
            layout = layouts[tensor.name]
            address, view = self._weights.next()
            source.update(view)
            writer.pad_to(places[tensor.name])
            if layout:
                self._kernels[tensor.name] = layout.name
                with layout.packed(tensor.type_id, tensor.shape, address, tensor.n_bytes) as rearranged:
                    writer.write(rearranged)
            else:
                writer.write(view)
            view.release()
            self._done += tensor.n_bytes
            self._on_progress(self._done / self._total)
        writer.pad_to(n_bytes)
        self._unsynced += n_bytes
        if self._unsynced > _SYNC_EVERY:
            for flusher in self._flushers:
                flusher.flush()
            self._unsynced = 0
        return writer

    def _next_home(self, n_bytes: int) -> tuple[Home, IO[bytes]]:
        """The place of the next piece, and the file to write it to."""
        number = self._divider.next(n_bytes)
        home = number, self._ends[number]
        self._ends[number] += n_bytes
        return home, self._outputs[number]

    def __enter__(self) -> _PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._weights.close()
        for flusher in self._flushers:
            flusher.close()


def _write_index(file: IO[bytes], index: dict[str, Any]) -> None:
    raw = json.dumps(index).encode()
    at = file.tell()
    file.write(raw)
    file.truncate()
    file.seek(0)
    file.write(HEAD.pack(MAGIC, VERSION, at, len(raw), zlib.crc32(raw)))
    _flush(file)


def _flush(file: IO[bytes]) -> None:
    """Write everything to the disk, and free the pages it took in the page cache."""
    file.flush()
    _sync(file.fileno())


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    drop_cached(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _PieceWriter:
    """Writes a layer or an expert, with a checksum for each piece of it.

    Args:
        next_home: called with the size of each piece.
        n_bytes: of the whole, at the end of which the last piece ends.

    Attributes:
        homes: where each piece is.
        checksums: of the pieces.
    """

    def __init__(
        self, next_home: Callable[[int], tuple[Home, IO[bytes]]], n_bytes: int, piece_bytes: int
    ) -> None:
        self._next_home = next_home
        self._n_bytes = n_bytes
        self._piece_bytes = piece_bytes
        self._written = self._piece_end = 0
        self._checksum = xxhash.xxh3_64()
        self.homes: list[Home] = []
        self.checksums: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            if self._written == self._piece_end:
                size = min(self._piece_bytes, self._n_bytes - self._written)
                home, self._file = self._next_home(size)
                self.homes.append(home)
                self._piece_end += size
            room = self._piece_end - self._written
            part, view = view[:room], view[room:]
            self._file.write(part)
            self._checksum.update(part)
            self._written += len(part)
            if self._written == self._piece_end:
                self.checksums.append(self._checksum.intdigest())
                self._checksum.reset()

    def pad_to(self, offset: int) -> None:
        self.write(bytes(offset - self._written))


class _Flusher:
    """Writes a file to the disk in a thread, while more is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1)
        self._job: Future[None] | None = None

    def flush(self) -> None:
        """Begin to write what the file has, when what was begun earlier has been written.

        Raises:
            OSError: that could not be written.
        """
        if self._job is not None:
            self._job.result()
        self._file.flush()
        self._job = self._pool.submit(_sync, self._file.fileno())

    def close(self) -> None:
        """Wait for the thread; what failed shows again when the file is synced at last."""
        self._pool.shutdown()


class _ReadAhead:
    """Reads tensors from a model's files in a given order, each while the one before is in use."""

    def __init__(self, files: ModelFiles, tensors: Sequence[FileTensor]) -> None:
        self._readers = [FileReader(path) for path in files.paths]
        size = round_up(max(tensor.n_bytes for tensor in tensors), BLOCK) + 2 * BLOCK
        self._memory = [mmap.mmap(-1, size) for _ in range(2)]
        self._pool = ThreadPoolExecutor(1)
        self._left = iter(tensors)
        self._coming: Future[tuple[int, memoryview]] | None = None
        self._read_next()

    def next(self) -> tuple[int, memoryview]:
        """The address and a view of the next tensor's bytes, valid until the next call."""
        assert self._coming is not None, "there are no more tensors"
        found = self._coming.result()
        self._read_next()
        return found

    def _read_next(self) -> None:
        """Begin to read the next tensor into the memory of the one before the last."""
        tensor = next(self._left, None)
        self._memory.reverse()
        self._coming = None if tensor is None else self._pool.submit(self._read, tensor, self._memory[0])

    def _read(self, tensor: FileTensor, memory: mmap.mmap) -> tuple[int, memoryview]:
        start = tensor.offset // BLOCK * BLOCK
        lead = tensor.offset - start
        with memoryview(memory) as view:
            size = round_up(lead + tensor.n_bytes, BLOCK)
            for piece in pieces(tensor.file, start, 0, size):
                with view[piece.at : piece.at + piece.n_bytes] as part:
                    self._readers[tensor.file].read_into([part], piece.offset)
            return address_of_map(memory) + lead, view[lead : lead + tensor.n_bytes]

    def close(self) -> None:
        """Close the files, and free the memory."""
        self._pool.shutdown()
        for reader in self._readers:
            reader.close()
        for memory in self._memory:
            with contextlib.suppress(BufferError):  # an exception's traceback may still hold a view
                memory.close()
