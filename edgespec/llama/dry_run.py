"""Dry runs: the memory that a context will allocate, found by setting it up without allocating.

llama.cpp can load a model's metadata alone and plan its contexts as if the weights were loaded. It reports
the sizes in its log and nowhere else. Rules of thumb were wrong by a factor of ten in both directions: a
context of 512 rows for wide feed-forward blocks takes hundreds of megabytes, one of 64 rows for a small model
ten.

Results are saved: they depend only on the model's header, the build and the context's shape.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.files.small_json import read_json, save_json
from edgespec.llama.cache.state_cache import N_SEQUENCES
from edgespec.llama.embedding import EmbeddingContext
from edgespec.llama.runtime.backend import build_identity, log_lines
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.types import GGUFHeader

_MIB = 1 << 20
_CACHE = re.compile(r": size = +([\d.]+) MiB \(")
# Their names are CPU; no device takes part.
_BUFFER = re.compile(r": +CPU\w* +(?:output|compute) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class Shape:
    """The sizes of a context; see runtime.context."""

    n_cells: int
    n_rows: int
    n_outputs: int
    n_sequences: int
    kv: str = "f16"

    def open(self, model: Model, beside: Context | None = None) -> Context:
        """A context of these sizes.

        Args:
            beside: of the target, for a draft head.
        """
        return Context(
            model,
            n_cells=self.n_cells,
            n_rows=self.n_rows,
            n_outputs=self.n_outputs,
            n_sequences=N_SEQUENCES if model.keeps_recurrent_state else self.n_sequences,
            n_threads=1,
            kv=self.kv,
            branching=True,
            beside=beside,
        )


@dataclass(frozen=True)
class EmbeddingContextShape(Shape):
    """The sizes of a context that computes embeddings."""

    def open(self, model: Model, beside: Context | None = None) -> Context:
        return EmbeddingContext(
            model,
            n_cells=self.n_cells,
            n_rows=self.n_rows,
            n_sequences=self.n_sequences,
            n_threads=1,
        )


@dataclass(frozen=True)
class Allocation:
    """Bytes of one context."""

    cache: int  # keys and values, or running states
    buffers: int  # compute buffers and logits


class AllocationStore:
    """The results of dry runs, a small file for each model, build and set of shapes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(
        self,
        header: GGUFHeader,
        shapes: Sequence[Shape],
        beside: GGUFHeader | None = None,
        *,
        mtp: bool = False,
    ) -> list[Allocation] | None:
        """Return what contexts of these shapes allocate: remembered, or found now and saved.

        Args:
            beside: of the target, for a draft head.
            mtp: contexts of the layers for multi-token prediction.

        Returns:
            One for each shape; None if this llama.cpp build does not report it.
        """
        path = self._path(header, shapes, beside)
        found = read_json(path, lambda kept: [Allocation(**entry) for entry in kept])
        if found is None:
            found = dry_run(header.path, shapes, None if beside is None else beside.path, mtp=mtp)
            if found is not None:
                save_json(path, [asdict(entry) for entry in found])
        return found

    def _path(self, header: GGUFHeader, shapes: Sequence[Shape], beside: GGUFHeader | None) -> Path:
        identity = f"{header.fingerprint} {build_identity()} {list(shapes)}"
        if beside is not None:
            identity += f" {beside.fingerprint}"
        return self._folder / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


def dry_run(
    path: Path, shapes: Sequence[Shape], beside: Path | None = None, *, mtp: bool = False
) -> list[Allocation] | None:
    """Find what contexts of these shapes allocate, without allocating weights or caches.

    A model with a running state has sequences for its states, whatever the shape says; a head has rows of
    its own.

    Args:
        beside: the target, for a draft head.
        mtp: contexts of the layers for multi-token prediction.

    Returns:
        One for each shape; None if this llama.cpp build does not report it.
    """
    found = []
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, memory_map=False, allocate=False, mtp=mtp))
        target: Context | None = None
        if beside is not None:
            large = Model(beside, memory_map=False, allocate=False)
            # An assistant has as many cells as its target.
            cells = max(shape.n_cells for shape in shapes)
            target = Shape(cells, 64, 64, 1).open(stack.enter_context(large))
        for shape in shapes:
            with log_lines() as lines:
                shape.open(model, target).close()
            text = "\n".join(lines.info)
            cache = [float(size) for size in _CACHE.findall(text)]
            buffers = [float(size) for size in _BUFFER.findall(text)]
            # Encoders keep no cache.
            if not buffers or not (cache or isinstance(shape, EmbeddingContextShape)):
                return None
            found.append(Allocation(round(sum(cache) * _MIB), round(sum(buffers) * _MIB)))
    return found
