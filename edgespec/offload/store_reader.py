"""Reading a store's layers piece by piece, and verifying what was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import xxhash

from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.state import FileState
from edgespec.kernels.ggml import Address
from edgespec.kernels.ggml.buffer_types import pinned_memory_name
from edgespec.offload.layout import Piece, Store, StoredLayer
from edgespec.offload.packing.index import remove_pack
from edgespec.offload.weight_memory import PinnedMemory, WeightMemory


class DamagedPack(StreamError):
    """The packed file is corrupted; it has been removed."""


class StoreReader:
    """Reads pieces of a store's layers, and verifies them.

    A piece of a packed file is compared with its checksum the first time it is read. A piece of the model's
    own files has no checksum, so one is computed then. Both are compared again if the file's state has
    changed since (see files.state): the file may have been renamed only, but it may also have been written
    to.

    Attributes:
        unpinned: whether a device pins memory, but not what was asked for.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.unpinned = False
        self._files: list[FileReader] = []
        self._checked: dict[Piece, tuple[int, FileState | None]] = {}  # checksum, and the file's state
        try:
            for path in store.paths:
                self._files.append(FileReader(path))
        except StreamError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """True if reads bypass the page cache."""
        return all(file.direct for file in self._files)

    def read(self, pieces: Sequence[Piece], memories: Sequence[memoryview]) -> None:
        """Read pieces that follow one another in a file, each into a memory of its own.

        Raises:
            StreamError: see FileReader; or the file's content has changed.
            DamagedPack: the bytes do not match their checksum.
        """
        file = self._files[pieces[0].file]
        before = file.check_unchanged()
        left = file.read_into(memories, pieces[0].offset)
        now = file.check_unchanged()
        for piece, memory in zip(pieces, memories, strict=True):
            self._check(file, piece, memory, min(left, piece.n_bytes), before, now)
            left -= piece.n_bytes

    def memory_for(self, n_bytes: int, device: Address) -> WeightMemory:
        """Memory for weights that are sent to a device; pinned, if files can be read into such memory."""
        memory = PinnedMemory.allocated(n_bytes, device)
        if memory is not None and self._reads_into(memory):
            return memory
        if memory is not None:
            memory.close()
        self.unpinned = self.unpinned or bool(pinned_memory_name(device))
        return WeightMemory(n_bytes)

    def _reads_into(self, memory: WeightMemory) -> bool:
        pieces = (piece for layer in self.store.layers.values() for piece in layer.pieces)
        piece = min(pieces, key=lambda piece: piece.n_bytes)  # the memory is for whole layers
        try:
            with memory.view(0, piece.n_bytes) as view:
                self.read([piece], [view])
        except StreamError:
            return False  # where the files are at fault, the next read of them says so
        return True

    def _check(
        self,
        file: FileReader,
        piece: Piece,
        memory: memoryview,
        n_bytes: int,
        before: FileState,
        now: FileState,
    ) -> None:
        """Compare what was read with its checksum, or compute that.

        Args:
            before, now: the file's states around the read.
        """
        known, state = self._checked.get(piece, (piece.checksum, None))
        if before == state == now:
            return
        with memory[:n_bytes] as read:
            checksum = xxhash.xxh3_64_intdigest(read)
        if self.store.packed and checksum != known:
            path = self.store.paths[piece.file]
            with suppress(OSError):
                remove_pack(self.store.pack or path)
            raise DamagedPack(
                f"The packed layer file '{path}' is damaged, and was removed.",
                "Load the model again, which recreates the file. If this happens twice, check the disk.",
            )
        if not self.store.packed and (now != file.opened if known is None else checksum != known):
            raise file.changed()
        self._checked[piece] = checksum, now if before == now else None

    def begin_layers(
        self, layers: Sequence[StoredLayer], memory: WeightMemory, n_threads: int
    ) -> LayersBeingRead:
        """Begin to read layers one after the other into `memory`."""
        return LayersBeingRead(self, layers, memory, n_threads)

    def close(self) -> None:
        for file in self._files:
            file.close()


class LayersBeingRead:
    """Layers that threads read one after the other into memory, which must outlive this.

    Attributes:
        starts: where each layer begins.
    """

    def __init__(
        self, reader: StoreReader, layers: Sequence[StoredLayer], memory: WeightMemory, n_threads: int
    ) -> None:
        self._reader = reader
        self._memory = memory
        self._pools = [ThreadPoolExecutor(n_threads) for _ in range(reader.store.n_disks)]
        self._reads: list[Future[None]] = []
        self.starts: dict[int, Address] = {}
        end = 0
        for layer in layers:
            self.starts[layer.index] = memory.address + end
            self._reads += [
                self._pools[reader.store.disk_of(piece)].submit(self._read, piece, end + piece.at)
                for piece in layer.pieces
            ]
            end += layer.n_bytes

    def _read(self, piece: Piece, at: int) -> None:
        with self._memory.view(at, piece.n_bytes) as view:
            self._reader.read([piece], [view])

    def wait(self, on_progress: Callable[[float], None]) -> None:
        """Wait until everything has been read."""
        for number, read in enumerate(self._reads):
            read.result()
            on_progress((number + 1) / len(self._reads))

    def close(self) -> None:
        """Read no more, and wait for reads that are under way."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
