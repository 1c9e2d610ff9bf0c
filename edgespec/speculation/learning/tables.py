"""Tables of learned numbers, by name, and counts kept in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FADE = 1 - 1 / 4000  # weight of the past, per learning step

Table = NDArray[np.float64]


class TableStore:
    """Tables of finite numbers by name, in memory; `profiles.table_file` saves them for the next run.

    Args:
        secret: by which those who fill the tables hide what cells are of, at most 128 bits.
    """

    def __init__(self, secret: int = 0) -> None:
        self.secret = secret
        self._tables: dict[str, NDArray[np.floating]] = {}
        self._changed = False

    def get(self, name: str, shape: tuple[int, ...]) -> NDArray[np.floating] | None:
        """The stored table itself, not a copy; None if there is none of this shape."""
        table = self._tables.get(name)
        return table if table is not None and table.shape == shape else None

    def put(self, name: str, table: NDArray[np.floating]) -> None:
        """Hold a table, without copying it, until `keep` writes it."""
        self._tables[name] = table
        self._changed = True

    def save(self) -> None:
        """Write the tables, if this store is backed by a file."""


class Counts:
    """Candidates tried and taken, by cell of a table; old counts fade slowly.

    Attributes:
        tried, taken: arrays in the table's shape; a candidate may count in several cells in part.
    """

    def __init__(self, store: TableStore, name: str, shape: tuple[int, ...]) -> None:
        self._store = store
        self._name = name
        table = store.get(name, (2, *shape))
        self._table = table.astype(np.float64) if table is not None else np.zeros((2, *shape))
        self.tried, self.taken = self._table
        self._changed = False
        np.maximum(self._table, 0, out=self._table)
        np.minimum(self.taken, self.tried, out=self.taken)

    def fade(self) -> None:
        """Give the counts so far a little less weight."""
        self._table *= _FADE

    def add(self, cells: tuple[NDArray[np.intp], ...], weights: Table, taken: Table) -> None:
        """Count candidates: their cells, the part of each that falls there, and 1 for those taken."""
        self._changed = True
        np.add.at(self.tried, cells, weights)
        np.add.at(self.taken, cells, weights * taken)

    def flush(self) -> None:
        """Hand the counts to the store, if there are new ones."""
        if self._changed:
            self._store.put(self._name, self._table)
            self._changed = False
