"""What was learned while running, kept for the next run: small tables of numbers by name.

One JSON file for each pair of models. A file that is damaged, of another version or holds tables of another
shape is as good as none: what it held is learned again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VERSION = 1
_FADE = 1 - 1 / 4000  # weight of the past, per step of learning

Table = NDArray[np.float64]


class TableStore:
    """Tables of finite numbers, none below 0, by name.

    Args:
        path: the file; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._tables = _read(path) if path is not None else {}
        self._changed = False

    @classmethod
    def for_pair(cls, folder: Path, fingerprints: Iterable[str]) -> TableStore:
        """The store of a target and its drafter, by the fingerprints of their headers."""
        key = hashlib.blake2b(" ".join(fingerprints).encode(), digest_size=16).hexdigest()
        return cls(folder / f"{key}.json")

    def get(self, name: str, shape: tuple[int, ...]) -> Table | None:
        """The table as it was kept; None if there is none of this shape."""
        table = self._tables.get(name)
        return table.copy() if table is not None and table.shape == shape else None

    def put(self, name: str, table: Table) -> None:
        """Hold a table until `keep`."""
        self._tables[name] = table
        self._changed = True

    def keep(self) -> None:
        """Write the tables; where that is not possible, they are learned again next time."""
        if self._path is None or not self._changed:
            return
        tables = {name: table.round(4).tolist() for name, table in self._tables.items()}
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"version": _VERSION, "tables": tables}))
            partial.replace(self._path)
        except OSError:
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
        np.minimum(self.taken, self.tried, out=self.taken)

    def fade(self) -> None:
        """Let the past count a little less."""
        self._table *= _FADE

    def add(self, cells: tuple[NDArray[np.intp], ...], weights: Table, taken: Table) -> None:
        """Count candidates: their cells, what part of each falls there, and 1 for those taken."""
        np.add.at(self.tried, cells, weights)
        np.add.at(self.taken, cells, weights * taken)

    def keep(self) -> None:
        """Hand the counts to the store."""
        if self._table.any():
            self._store.put(self._name, self._table)


def _read(path: Path) -> dict[str, Table]:
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            return {}
        tables = {str(name): np.array(table, dtype=np.float64) for name, table in content["tables"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    sound = all(np.isfinite(table).all() and (table >= 0).all() for table in tables.values())
    return tables if sound else {}
