"""What was learned while running, kept for the next run: small tables of numbers by name.

One file for each pair of models. A file that is damaged, of another version or holds tables of another
shape is as good as none: what it held is learned again. Tables are mostly zeros, and are kept as their other
cells: written after every answer, the file must cost next to nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.files import written_whole

_VERSIONED = "2 "  # what names of tables begin with in this version of the file
_CELLS, _VALUES, _SHAPE = " cells", " values", " shape"
_MOST_CELLS = 1 << 24  # of a table: larger ones are none of ours
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

    def get(self, name: str, shape: tuple[int, ...]) -> NDArray[np.floating] | None:
        """The table as it was kept, the store's own, no copy; None if there is none of this shape."""
        table = self._tables.get(name)
        return table if table is not None and table.shape == shape else None

    def put(self, name: str, table: NDArray[np.floating]) -> None:
        """Hold a table until `keep`; no copy is made."""
        self._tables[name] = table
        self._changed = True

    def keep(self) -> None:
        """Write the tables; where that is not possible, they are learned again next time."""
        if self._path is None or not self._changed:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._path, lasting=False) as file:
                np.savez(file, allow_pickle=False, **_packed(self._tables))
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
        self._table = table.astype(np.float64) if table is not None else np.zeros((2, *shape))
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


def _packed(tables: Mapping[str, NDArray[np.floating]]) -> dict[str, NDArray[np.generic]]:
    """The arrays of a file: of each table its shape, and its cells that are not 0 with their values."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, table in tables.items():
        cells = np.flatnonzero(table)
        arrays[_VERSIONED + name + _SHAPE] = np.array(table.shape, dtype=np.int64)
        arrays[_VERSIONED + name + _CELLS] = cells.astype(np.uint32)
        arrays[_VERSIONED + name + _VALUES] = table.ravel()[cells].astype(np.float32)
    return arrays


def _read(path: Path) -> dict[str, NDArray[np.floating]]:
    tables: dict[str, NDArray[np.floating]] = {}
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for key in file.files:
                if key.startswith(_VERSIONED) and key.endswith(_SHAPE):
                    stem = key.removesuffix(_SHAPE)
                    shape = tuple(file[key].astype(np.int64).tolist())
                    tables[stem.removeprefix(_VERSIONED)] = _unpacked(
                        shape, file[stem + _CELLS], file[stem + _VALUES]
                    )
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        EOFError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        return {}
    return tables


def _unpacked(
    shape: tuple[int, ...], cells: NDArray[np.generic], values: NDArray[np.generic]
) -> NDArray[np.float32]:
    """A table from its shape and its cells.

    Raises:
        ValueError, TypeError, IndexError: they do not make a table of finite numbers.
    """
    if any(size < 0 for size in shape) or math.prod(shape) > _MOST_CELLS:
        raise ValueError("no table of ours is so large")
    table = np.zeros(math.prod(shape), dtype=np.float32)
    table[cells] = values.astype(np.float32)
    if not np.isfinite(table).all():
        raise ValueError("a number is not finite")
    return table.reshape(shape)
