"""What was learned while running, kept for the next run: small tables of numbers by name.

One file for each pair of models. A file that is damaged, of another version or holds tables of another
shape is as good as none: what it held is learned again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VERSIONED = "1 "  # what names of tables begin with in this version of the file
_FADE = 1 - 1 / 4000  # weight of the past, per step of learning

Table = NDArray[np.float64]


class TableStore:
    """Tables of finite numbers by name.

    Args:
        path: the file; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._tables: dict[str, NDArray[np.floating]] = _read(path) if path is not None else {}
        self._changed = False

    @classmethod
    def for_pair(cls, folder: Path, fingerprints: Iterable[str]) -> TableStore:
        """The store of a target and its drafter, by the fingerprints of their headers."""
        key = hashlib.blake2b(" ".join(fingerprints).encode(), digest_size=16).hexdigest()
        return cls(folder / f"{key}.npz")

    def get(self, name: str, shape: tuple[int, ...]) -> Table | None:
        """The table as it was kept; None if there is none of this shape."""
        table = self._tables.get(name)
        return table.astype(np.float64) if table is not None and table.shape == shape else None

    def put(self, name: str, table: NDArray[np.floating]) -> None:
        """Hold a table until `keep`."""
        self._tables[name] = table
        self._changed = True

    def keep(self) -> None:
        """Write the tables; where that is not possible, they are learned again next time."""
        if self._path is None or not self._changed:
            return
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    allow_pickle=False,
                    **{_VERSIONED + name: table.astype(np.float32) for name, table in self._tables.items()},
                )
            partial.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        self._changed = False


class Counts:
    """Candidates tried and taken, by cell of a table; the past fades slowly.

    Attributes:
        tried, taken: of the table's shape; parts of a candidate may fall into several cells.
    """

    def __init__(self, store: TableStore, name: str, shape: tuple[int, ...]) -> None:
        self._store = store
        self._name = name
        table = store.get(name, (2, *shape))
        self._table = table if table is not None else np.zeros((2, *shape))
        self.tried, self.taken = self._table
        self._changed = False
        np.maximum(self._table, 0, out=self._table)
        np.minimum(self.taken, self.tried, out=self.taken)

    def fade(self) -> None:
        """Let the past count a little less."""
        self._table *= _FADE

    def add(self, cells: tuple[NDArray[np.intp], ...], weights: Table, taken: Table) -> None:
        """Count candidates: their cells, what part of each falls there, and 1 for those taken."""
        self._changed = True
        np.add.at(self.tried, cells, weights)
        np.add.at(self.taken, cells, weights * taken)

    def keep(self) -> None:
        """Hand the counts to the store, if there are new ones."""
        if self._changed:
            self._store.put(self._name, self._table)
            self._changed = False


def _read(path: Path) -> dict[str, NDArray[np.floating]]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            tables = {
                name.removeprefix(_VERSIONED): file[name].astype(np.float32)
                for name in file.files
                if name.startswith(_VERSIONED)
            }
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}
    return tables if all(np.isfinite(table).all() for table in tables.values()) else {}
