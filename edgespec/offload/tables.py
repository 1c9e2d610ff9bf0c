"""Tables that stay in the model's files: passes look up a few rows of them, and multiply by none."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress

from edgespec.errors import EdgeSpecError, ModelFileError, StreamError
from edgespec.files.state import FileState, states_of
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.models.gguf.layers import ModelFiles


class MappedTables:
    """The tables of one model, mapped, so that the system reads the rows that tokens need and may drop them.

    Attributes:
        names: of the tables.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._tables = files.tables
        self._paths = files.paths
        self._states: tuple[FileState, ...] = ()
        self._maps: list[mmap.mmap] = []
        self.names = tuple(table.name for table in self._tables)

    def place(self, tensors: Mapping[str, Address]) -> None:
        """Point the tensors of a loaded model into its files.

        Args:
            tensors: name to address; tables that llama.cpp does not use are absent.

        Raises:
            StreamError: a file cannot be mapped.
        """
        used = [table for table in self._tables if table.name in tensors]
        if not used:
            return
        try:
            self._states = states_of(self._paths)
            for table in used:
                with self._paths[table.file].open("rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StreamError(
                f"'{self._paths[0]}' cannot be mapped: {error}.", "Load the model again."
            ) from error
        for table, area in zip(used, self._maps, strict=True):
            if hasattr(mmap, "MADV_RANDOM"):  # a row is all that is wanted, not what follows it
                area.madvise(mmap.MADV_RANDOM)
            ggml.set_data(tensors[table.name], ggml.address_of_map(area) + table.offset)

    def change(self) -> EdgeSpecError | None:
        """An error if a file that rows are read from has changed; else None."""
        if not self._maps:
            return None
        with suppress(OSError):  # it may no longer exist
            if states_of(self._paths) == self._states:
                return None
        return ModelFileError(
            f"'{self._paths[0]}' was changed, moved or removed while the model was in use.",
            "Some weights are read from it; load the model again.",
        )

    def close(self) -> None:
        """Unmap them, after the model has been freed."""
        for area in self._maps:
            area.close()
        self._maps = []
