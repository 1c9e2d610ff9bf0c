"""Tables that stay in the model's files: passes look up a few rows of them, and multiply by none."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from edgespec.base.mapped_memory import give_back, read_rows_alone
from edgespec.errors import BackendError, EdgeSpecError, ModelFileError, StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK
from edgespec.files.state import FileState
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType
from edgespec.llama.runtime.weight_store import AllInMemory, BufferTypes
from edgespec.models.gguf.layers import FileTensor, ModelFiles
from edgespec.offload.weight_memory import WeightMemory

_CHUNK = 4 << 20  # of the table, read to compare its content


class MappedTables:
    """The tables of one model, mapped, so that the system reads the rows that tokens need and may drop them.

    Attributes:
        names: of the tables.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._tables = files.tables
        self._paths = files.paths
        self._mapped: list[_MappedTable] = []
        self.names = tuple(table.name for table in self._tables)

    def patterns(self, buffer_type: Address) -> BufferTypes:
        """Overrides under which llama.cpp creates the tables without memory."""
        return [(f"^{re.escape(name)}$", buffer_type) for name in self.names]

    def place(self, tensors: Mapping[str, Address]) -> None:
        """Point the tensors of a loaded model into its files.

        Args:
            tensors: name to address; tables that llama.cpp does not use are absent.

        Raises:
            StreamError: a file cannot be mapped.
        """
        for table in self._tables:
            if table.name not in tensors:
                continue
            try:
                mapped = _MappedTable.of(self._paths[table.file], table)
            except (OSError, ValueError) as error:
                raise StreamError(
                    f"'{self._paths[table.file]}' cannot be mapped: {error}.", "Load the model again."
                ) from error
            self._mapped.append(mapped)
            ggml.set_data(tensors[table.name], ggml.address_of_map(mapped.area) + table.offset)

    def change(self) -> EdgeSpecError | None:
        """An error if a table that rows are read from has changed; else None.

        It is asked for around every pass, and gives the pages back that the last one has looked up.
        """
        for number, table in enumerate(self._mapped):
            table.give_back()
            try:
                self._mapped[number] = table.unchanged()
            except EdgeSpecError:
                return ModelFileError(
                    f"'{table.reader.path}' was changed while the model was in use.",
                    "Some weights are read from it; load the model again.",
                )
        return None

    def close(self) -> None:
        """Unmap them, after the model has been freed."""
        for table in self._mapped:
            table.close()
        self._mapped = []


@dataclass(frozen=True)
class _MappedTable:
    """A table in a mapped file."""

    table: FileTensor
    reader: FileReader
    area: mmap.mmap
    checksum: int  # of its bytes when it was mapped
    state: FileState  # of the file, in which the table had that checksum

    @classmethod
    def of(cls, path: Path, table: FileTensor) -> _MappedTable:
        """Map a table; raises OSError, ValueError, StreamError."""
        reader = FileReader(path)
        try:
            area = reader.mapped()
            read_rows_alone(area)
            return cls(table, reader, area, _checksum(reader, table), reader.opened)
        except BaseException:
            reader.close()
            raise

    def give_back(self) -> None:
        """Take no memory of this process for rows until they are looked up again."""
        give_back(self.area, self.table.offset, self.table.n_bytes)

    def unchanged(self) -> _MappedTable:
        """The table with the file's state now.

        A file that was moved, linked or removed still has its content, which its state does not say.

        Raises:
            StreamError: the content has changed.
        """
        now = self.reader.check_unchanged()
        if now == self.state:
            return self
        if _checksum(self.reader, self.table) != self.checksum:
            raise self.reader.changed()
        return replace(self, state=now)

    def close(self) -> None:
        self.area.close()
        self.reader.close()


def _checksum(reader: FileReader, table: FileTensor) -> int:
    """The checksum of a table's bytes, read past the page cache."""
    digest, end = xxhash.xxh3_64(), table.offset + table.n_bytes
    with closing(WeightMemory(_CHUNK)) as memory, memory.view(0, _CHUNK) as view:
        for start in range(table.offset // BLOCK * BLOCK, end, _CHUNK):
            n_bytes = reader.read_into([view], start)
            with view[max(table.offset - start, 0) : min(n_bytes, end - start)] as part:
                digest.update(part)
    return digest.intdigest()


class WeightsBesideTables(AllInMemory):
    """Weights in memory, except for the tables of one model: a `WeightStore`.

    Args:
        files: of a model that has some.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._tables = MappedTables(files)
        self._unbacked = UnbackedBufferType(None)

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Make llama.cpp create the tables' tensors without memory, and load the rest."""
        patterns = self._tables.patterns(self._unbacked.address)
        with super().loading(path, params, patterns + buffer_types) as load_path:
            yield load_path

    def loaded(self) -> None:
        """Point the tables into the files.

        Raises:
            StreamError: a file cannot be mapped.
            BackendError: llama.cpp could not create the tables' buffers.
        """
        if self._unbacked.error is not None:
            raise BackendError(f"Tables cannot be mapped: {self._unbacked.error}.") from self._unbacked.error
        self._unbacked.finalize()
        self._tables.place(self._unbacked.tensors)

    def failure(self) -> EdgeSpecError | None:
        """An error if a table has changed."""
        return self._tables.change()

    def close(self) -> None:
        """Free everything, after the model has been freed."""
        self._unbacked.close()
        self._tables.close()
