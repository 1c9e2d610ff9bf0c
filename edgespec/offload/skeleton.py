"""A model file for llama.cpp to load, with holes where streamed weights would be.

llama.cpp reads every tensor of a file when it loads it, those too that it then drops into a streamed
buffer. A model of forty gigabytes would be read once for nothing. So it is given a copy in memory that
has the header and the tensors it keeps, and nothing else: a hole reads as zeros and takes no space.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edgespec.models.gguf import GGUFHeader
from edgespec.offload.layout import ModelFiles

_CHUNK = 8 << 20


@contextmanager
def skeleton(
    files: ModelFiles, holes: frozenset[str], on_progress: Callable[[float], None]
) -> Iterator[Path]:
    """A path to load the model from, the tensors named in `holes` left out; gone when the block ends.

    Where the system cannot keep files in memory, it is the model's own path.
    """
    if not hasattr(os, "memfd_create"):
        yield files.paths[0]
        return
    kept = sum(t.n_bytes for header in files.headers for t in header.tensors if t.name not in holes)
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        on_progress(min(done / max(kept, 1), 1.0))

    with ExitStack() as stack:
        # llama.cpp finds the parts of a split model by their names, so the copies bear them.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgespec-")))
        for header in files.headers:
            descriptor = os.memfd_create(header.path.name, os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            _copy(header, descriptor, holes, count)
            (folder / header.path.name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield folder / files.paths[0].name


def _copy(header: GGUFHeader, target: int, holes: frozenset[str], count: Callable[[int], None]) -> None:
    os.ftruncate(target, header.file_bytes)
    ranges = [(0, header.data_offset)]
    ranges += [(t.offset, t.offset + t.n_bytes) for t in header.tensors if t.name not in holes]
    with header.path.open("rb", buffering=0) as file:
        for start, end in ranges:
            at = start
            while at < end:
                data = os.pread(file.fileno(), min(_CHUNK, end - at), at)
                if not data:
                    break  # cut short since its header was read; llama.cpp will say so
                os.pwrite(target, data, at)
                at += len(data)
            count(end - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
