"""Learned tables of a pair of models, saved in a file for the next run.

A file that is damaged, of another version, or with tables of another shape is ignored, and its contents are
learned again. Tables are mostly zeros, so only their nonzero cells are written: the file is saved after every
answer, which must take next to no time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgespec.files.writing import atomic_write
from edgespec.speculation.learning.tables import TableStore

_VERSIONED = "2 "  # prefix of table names in this version of the file
_CELLS, _VALUES, _SHAPE = " cells", " values", " shape"
_MAX_CELLS = 1 << 24  # of a table; larger ones were not written by this program
_AT_ONCE = 1 << 16  # cells that are searched at a time


class TableFile(TableStore):
    """A table store that is backed by a file."""

    def __init__(self, path: Path, secret: int = 0) -> None:
        super().__init__(secret)
        self._path = path
        self._tables = _read(path)

    @classmethod
    def for_pair(cls, folder: Path, fingerprints: Iterable[str], secret: bytes) -> TableFile:
        """The file of a target and its drafter, by the fingerprints of their headers.

        Args:
            secret: what is learned under one secret means nothing under another, so its file is another one.
        """
        key = hashlib.blake2b(" ".join(fingerprints).encode(), key=secret, digest_size=16).hexdigest()
        return cls(folder / f"{key}.npz", int.from_bytes(secret, "little"))

    def save(self) -> None:
        """Write the tables; if that fails, they are learned again next time."""
        if not self._changed:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path, durable=False) as file:
                _write(file, self._tables)
        self._changed = False


def _write(file: IO[bytes], tables: Mapping[str, NDArray[np.floating]]) -> None:
    """Write the file as `np.savez` would, but with only one array of it in memory at a time."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, table in tables.items():
            for kind, make in _PACKED.items():
                with archive.open(f"{_VERSIONED}{name}{kind}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, make(table), allow_pickle=False)


def _cells_of(table: NDArray[np.floating]) -> NDArray[np.uint32]:
    """The numbers of the cells that are not zero."""
    flat, found = table.ravel(), []
    for start in range(0, flat.size, _AT_ONCE):  # numpy finds them as numbers of 64 bits
        found.append((np.flatnonzero(flat[start : start + _AT_ONCE]) + start).astype(np.uint32))
    return np.concatenate(found) if found else np.empty(0, dtype=np.uint32)


_PACKED: Mapping[str, Callable[[NDArray[np.floating]], NDArray[np.generic]]] = {
    _SHAPE: lambda table: np.array(table.shape, dtype=np.int64),
    _CELLS: _cells_of,
    _VALUES: lambda table: table[table != 0].astype(np.float32, copy=False),
}


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
    if any(size < 0 for size in shape) or math.prod(shape) > _MAX_CELLS:
        raise ValueError("no table of ours is so large")
    table = np.zeros(math.prod(shape), dtype=np.float32)
    table[cells] = values.astype(np.float32)
    if not np.isfinite(table).all():
        raise ValueError("a number is not finite")
    return table.reshape(shape)
