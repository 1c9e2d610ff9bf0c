"""The child's part of vetting a model file: load it with zeros for its weights, tokenize, and compute.

Run by `processes.trial` for `runtime.vetting`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import MemoryLimitError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType, UnsupportedBuild
from edgespec.kernels.watch import Watch, can_watch
from edgespec.llama.embedding import EmbeddingContext
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model, load_adapter
from edgespec.llama.runtime.weight_store import AllInMemory, BufferTypes
from edgespec.models.gguf.embedding import embedding_shape
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import is_layer_weight

_TEXTS = (
    "Hello, world! It's 3.14 o'clock.\n\n  def f(x):\n\treturn x + 1  \n",
    "Ünïcödé 日本語 ไทย ❤️ \u00a0\u200b <|im_start|><s>[INST] <0x41>",
    " ",
    "    a\r\n\r\n1234567 ...",
)


class ZeroWeights(AllInMemory):
    """All weights of a model are address space, whose pages read as zeros.

    Raises:
        UnsupportedBuild: this llama.cpp build is not as expected.
    """

    def __init__(self) -> None:
        ggml.check()
        self._unbacked = UnbackedBufferType(None)

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Make llama.cpp create all tensors without memory."""
        table = ggml.overrides([(".*", self._unbacked.address)])
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        yield path
        params.tensor_buft_overrides = None

    def loaded(self) -> None:
        """Give the tensors back their names.

        Raises:
            MemoryLimitError: there is no address space for their buffers.
        """
        if self._unbacked.error is not None:
            raise MemoryLimitError(f"No address space: {self._unbacked.error}.") from self._unbacked.error
        self._unbacked.finalize()

    @property
    def tensors(self) -> Mapping[str, Address]:
        """The addresses of all tensors."""
        return self._unbacked.tensors

    def close(self) -> None:
        """Release the address space, after the model has been freed."""
        self._unbacked.close()


def zeros_work() -> bool:
    """True if this llama.cpp build takes zeros for weights."""
    try:
        ZeroWeights().close()
    except UnsupportedBuild:
        return False
    return True


@contextmanager
def model_with_zeros(path: Path, *, mtp: bool = False) -> Iterator[Model]:
    """A model with zeros for its weights, whose file need not have been vetted.

    Args:
        mtp: load its layers for multi-token prediction, too.

    Raises:
        UnsupportedBuild: this llama.cpp build is not as expected.
    """
    weights = ZeroWeights()
    try:  # they are closed after the model whose tensors they hold
        with Model(path, memory_map=False, repack=False, weights=weights, vetted=False, mtp=mtp) as model:
            yield model
    finally:
        weights.close()


def planned_model(path: Path, *, mtp: bool = False) -> Model:
    """A model that is planned only, where builds do not take zeros: nothing can be computed."""
    return Model(path, memory_map=False, repack=False, allocate=False, vetted=False, mtp=mtp)


def small_context(model: Model, *observers: GraphObserver) -> Context:
    """A context of a few cells."""
    return Context(
        model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1, observers=observers
    )


def read_and_write(model: Model) -> None:
    """Tokenize some texts, and ask for the text of every token."""
    vocabulary = model.vocabulary
    for text in _TEXTS:
        for control in (False, True):
            vocabulary.tokenize(text, control=control, bos=True)
    for token in range(vocabulary.n_tokens):
        vocabulary.piece(token, control=True)


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Do what loading the model at "path" and reading a prompt do.

    An adapter is applied to the model at "beside". A "head" is only loaded. With "mtp", the model's layers
    for further tokens are loaded, too.

    Returns:
        The names of a model's matrices in the "order" in which a pass reads them, if that was seen.
    """
    start_backend()
    path, mtp = Path(request["path"]), bool(request.get("mtp"))
    if "beside" in request:
        _compute(Path(request["beside"]), adapter=path)
    elif request.get("head"):
        with planned_model(path, mtp=mtp) as model:
            read_and_write(model)
    else:
        return {"order": _compute(path, mtp=mtp)}
    return {}


def _compute(path: Path, adapter: Path | None = None, *, mtp: bool = False) -> list[str]:
    """Read a prompt of two tokens, then one more.

    Returns:
        As ReadingOrder.names.
    """
    if not zeros_work():
        with planned_model(path, mtp=mtp) as model:
            read_and_write(model)
            (_open_embedding(model) if _embeds(path) else small_context(model)).close()
        if adapter is not None:
            with Model(path, memory_map=True, repack=False, vetted=False) as model:
                load_adapter(model, adapter)
        return []
    with model_with_zeros(path, mtp=mtp) as model:
        if adapter is None:
            read_and_write(model)
        if adapter is None and _embeds(path):
            _open_embedding(model).embed([[0, 0], [0]])
            return []
        assert isinstance(model.weights, ZeroWeights)
        order = ReadingOrder(model.weights.tensors) if can_watch() else None
        context = small_context(model, *([order] if order else []))
        if adapter is not None:
            context.adapt([(load_adapter(model, adapter), 1.0)])
        for position, tokens in ((0, [0, 0]), (2, [0])):
            context.decode(TokenBatch.run(tokens, position, n_sequences=1, logits="last"))
            context.logits()
        context.close()
        return order.names if order else []


def _embeds(path: Path) -> bool:
    return embedding_shape(read_header(path)) is not None


def _open_embedding(model: Model) -> EmbeddingContext:
    return EmbeddingContext(model, n_cells=256, n_rows=64, n_sequences=2, n_threads=1)


class ReadingOrder(GraphObserver):
    """Observes the order in which passes read the matrices of layers.

    Attributes:
        names: of the matrices, in that order; empty if it was not the same in all passes.
    """

    def __init__(self, tensors: Mapping[str, Address]) -> None:
        self.watch = Watch()
        self.names: list[str] = []
        self._names_of = {address: name for name, address in tensors.items() if is_layer_weight(name)}
        self._passes = 0
        for address in self._names_of:
            self.watch.ask_about_readers(address, 0)

    def end(self, *, completed: bool) -> None:
        """Compare the order of a pass with that of the passes before."""
        read = [self._names_of[reader.tensor] for reader in self.watch.readers()]
        if not completed or (self._passes and read != self.names):
            read = []
        self.names = read
        self._passes += 1
