"""Model files that are changed behind the program's back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from edgespec.models.gguf import read_header
from edgespec.offload.layout import FileTensor, ModelFiles


@contextlib.contextmanager
def time_put_back(path: Path) -> Iterator[None]:
    """As copying tools do: whatever is written meanwhile, the file's time is the old one afterwards."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def rearrange(path: Path) -> None:
    """Let matrices of every layer change places in the file; its size, header and time stay what they are."""
    with time_put_back(path), path.open("r+b") as file:
        for one, other in _alike(path):
            spans = []
            for tensor in (one, other):
                file.seek(tensor.offset)
                spans.append(file.read(tensor.n_bytes))
            for tensor, data in zip((other, one), spans, strict=True):
                file.seek(tensor.offset)
                file.write(data)


def _alike(path: Path) -> Iterator[tuple[FileTensor, FileTensor]]:
    """Two matrices of each layer that have the same shape and type."""
    found = False
    for layer in ModelFiles.of(read_header(path)).layers():
        first: dict[tuple[int, tuple[int, ...]], FileTensor] = {}
        for tensor in layer.tensors:
            other = first.setdefault((tensor.type_id, tensor.shape), tensor)
            if other is not tensor:
                found = True
                yield other, tensor
                break
    assert found
