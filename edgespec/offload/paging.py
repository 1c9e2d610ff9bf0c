"""Read-ahead for mapped weights, the fallback where weights cannot be streamed.

A mapped model larger than memory is read page by page, at page faults, and the disk is idle in between. So
threads read the next layers into the page cache whenever a pass begins a layer. This relies on none of
llama.cpp's internals: the nodes of its graph are named after their layers, and its callback says which node
comes next.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.files.positioned import can_read_at_offsets, open_positioned
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnsupportedBuild
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.weight_store import AllInMemory, BufferTypes
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import Piece, plain_store

_AHEAD = 1  # layers after the one that begins; more could evict pages before they are used
_N_READERS = 2
_LAYER_OF_NODE = re.compile(rb".*-(\d+)")


class PagedWeights(AllInMemory, GraphObserver):
    """The mapped weights of one model, read ahead: a `WeightStore`, and the observer that it needs.

    Time spent on page faults cannot be told apart from computing, so none counts as waited for.

    Attributes:
        read_bytes: total bytes read ahead.

    Raises:
        UnsupportedBuild: its graphs cannot be watched here.
        OSError: a file cannot be opened.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._name_of: Callable[[Address], bytes] = ggml.functions()["ggml_get_name"]
        self.watch = Watch()
        self.watch.ask_about_numbers()
        layers = plain_store(files, files.layers()).layers
        if not layers:
            raise UnsupportedBuild(f"'{files.paths[0].name}' has no layers")
        self.paths = files.paths
        self._order = sorted(layers)
        self._pieces = {index: layer.pieces for index, layer in layers.items()}
        self._changed = threading.Condition()
        self._jobs: deque[Piece] = deque()
        self._asked: set[int] = set()  # layers requested in this pass
        self._layer = -1
        self._closing = False
        self.read_bytes = 0
        self.observers = [self]
        self._files = [open_positioned(path, direct=False) for path in files.paths]
        self._threads = [
            threading.Thread(target=self._work, name=f"edgespec-pager-{n}", daemon=True)
            for n in range(_N_READERS)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def loading(self, path: Path, _params: Any, _buffer_types: BufferTypes) -> Iterator[Path]:
        """Amend nothing: mapped weights stay as they are in the file."""
        yield path

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A decode begins: request the first layers."""
        with self._changed:
            self._layer = -1
            self._asked.clear()
            self._jobs.clear()
        self._ask_for(self._order[0])

    def end(self, *, completed: bool) -> None:
        with self._changed:
            self._jobs.clear()

    def close(self) -> None:
        """End the threads and close the files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files:
            file.close()

    def reached(self, node: Address) -> bool:
        """A run of nodes with another number begins: if it is a layer's, request the next ones, and stop."""
        match = _LAYER_OF_NODE.fullmatch(self._name_of(node) or b"")
        layer = int(match[1]) if match else self._layer
        if layer == self._layer or layer not in self._pieces:
            return False
        self._layer = layer
        self._ask_for(layer)
        return True

    def _ask_for(self, layer: int) -> None:
        """Request this layer and its successors, unless they have been requested in this pass."""
        at = self._order.index(layer)
        with self._changed:
            for index in self._order[at : at + 1 + _AHEAD]:
                if index not in self._asked:
                    self._asked.add(index)
                    self._jobs.extend(self._pieces[index])
            self._changed.notify_all()

    def _work(self) -> None:
        scratch = bytearray(max(piece.n_bytes for pieces in self._pieces.values() for piece in pieces))
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                piece = self._jobs.popleft()
            try:
                with memoryview(scratch) as memory, memory[: piece.n_bytes] as part:
                    n = self._files[piece.file].read([part], piece.offset)
            except OSError:
                continue  # llama.cpp will fault on it, if it is needed
            with self._changed:
                self.read_bytes += n


def try_paging(files: ModelFiles) -> PagedWeights | None:
    """Read-ahead for a mapped model; None if that is not possible here."""
    if not can_read_at_offsets():
        return None
    try:
        return PagedWeights(files)
    except (UnsupportedBuild, OSError, AttributeError):
        return None
