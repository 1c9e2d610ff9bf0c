"""Reading a safetensors file: a small format, and untrusted input.

The format: the length of a JSON header in 8 bytes, the header, the data. Every tensor is checked to lie
inside the file before any of it is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError

_MAX_HEADER = 64 << 20
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its type's name, its shape with rows first, and where its data begins in the file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    def integers(self) -> NDArray[np.int64]:
        """The values of a tensor of integers.

        Raises:
            ModelFileError: it is none.
        """
        if self.kind not in ("I64", "I32"):
            raise _damaged(self.path, f"a table has the type {self.kind}")
        return self._raw().astype(np.int64)

    def floats(self) -> NDArray[np.float32]:
        """The values.

        Raises:
            ModelFileError: they are of another type.
        """
        if self.kind not in ("F32", "F16", "BF16"):
            raise _damaged(self.path, f"a matrix has the type {self.kind}")
        raw = self._raw()
        if self.kind == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def _raw(self) -> NDArray[Any]:
        count = math.prod(self.shape)
        return np.fromfile(self.path, _TYPES[self.kind], count, offset=self.offset).reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        ModelFileError: it cannot be read, or is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise _damaged(path, "its header is longer than the file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return {
        name: _tensor(path, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise _damaged(path, f"its entry for {name!r} cannot be understood") from error
    if kind not in _TYPES:
        return StoredTensor(path, kind, shape, start + begin)  # it cannot be read, and need not be
    n_bytes = math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
    if min(shape, default=1) < 1 or end - begin != n_bytes or begin < 0 or start + end > size:
        raise _damaged(path, f"{name!r} does not lie inside it")
    return StoredTensor(path, kind, shape, start + begin)


def _damaged(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a usable safetensors file: {what}.", "Download it again.")
