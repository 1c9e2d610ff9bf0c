"""The child's part of vetting a model file: load it with zeros for its weights, tokenize, and compute.

Run by `processes.trial` for `runtime.vetting`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from edgespec.errors import EdgeSpecError, MemoryLimitError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType, UnsupportedBuild
from edgespec.kernels.watch import new_watch
from edgespec.models.gguf.embedding import embedding_shape
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import is_layer_weight
from edgespec.models.llama.embedding import EmbeddingContext
from edgespec.models.llama.heads.context import MTPContext
from edgespec.models.llama.heads.last_states import LastStates
from edgespec.models.llama.heads.opening import draft_from_zeros, head_context
from edgespec.models.llama.runtime.adapters import load_adapter
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context, FloatArray
from edgespec.models.llama.runtime.graph import GraphObserver
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.weight_store import AllInMemory, BufferTypes

_TEXTS = (
    "Hello, world! It's 3.14 o'clock.\n\n  def f(x):\n\treturn x + 1  \n",
    "Ünïcödé 日本語 ไทย ❤️ \u00a0\u200b <|im_start|><s>[INST] <0x41>",
    " ",
    "    a\r\n\r\n1234567 ...",
)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Do what loading the model at "path" and reading a prompt do.

    A head drafts beside its target at "beside", and is only loaded without one. With "mtp_file", the layers
    for further tokens in the file draft. An adapter is applied to the model at "beside". With "mtp", the
    model's layers for further tokens draft, too.

    Returns:
        The "error" with which llama.cpp refused the file, or else the names of a model's matrices in the
        "order" in which a pass reads them, if that was seen.
    """
    path = Path(request["path"])
    order: list[str] = []
    try:
        if request.get("adapter"):
            _compute(Path(request["beside"]), adapter=path)
        elif "beside" in request:
            _open_head(path, Path(request["beside"]))
        elif request.get("head"):
            with _planned(path) as model:
                _read_and_write(model)
        elif request.get("mtp_file"):
            _draft_alone(path)
        else:
            order = _compute(path, mtp=bool(request.get("mtp")))
    except MemoryLimitError:
        raise  # says nothing of the file
    except EdgeSpecError as error:
        return {"error": error.what}
    return {"order": order}


def _compute(path: Path, adapter: Path | None = None, *, mtp: bool = False) -> list[str]:
    """Read a prompt of two tokens, then one more; and draft two tokens with layers for further tokens.

    Returns:
        As ReadingOrder.names.
    """
    try:
        weights = ZeroWeights()
    except UnsupportedBuild:
        with _planned(path, mtp=mtp) as model:
            _read_and_write(model)
            (_open_embedding(model) if _embeds(path) else _open(model)).close()
            if mtp:
                _open_mtp(model).close()
        if adapter is not None:
            with Model(path, memory_map=True, repack=False, vetted=False) as model:
                load_adapter(model, adapter)
        return []
    try:
        with Model(path, memory_map=False, repack=False, weights=weights, vetted=False, mtp=mtp) as model:
            if adapter is None:
                _read_and_write(model)
            if adapter is None and _embeds(path):
                _open_embedding(model).embed([[0, 0], [0]])
                return []
            order = ReadingOrder(weights.tensors)
            context = _open(model, order)
            if adapter is not None:
                context.adapt([(load_adapter(model, adapter), 1.0)])
            for position, tokens in ((0, [0, 0]), (2, [0])):
                context.decode(TokenBatch.run(tokens, position, n_sequences=1, logits="last"))
                context.logits()
            if mtp:
                _draft(model, context)
            context.close()
            return order.names
    finally:
        weights.close()


def _draft(model: Model, context: Context) -> None:
    """Draft from the last states of two tokens, and then from the layer's own."""
    states = LastStates(int(llama_cpp.llama_model_n_embd(model.handle)))
    states.attach(context)
    context.clear()
    context.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="all"))
    _draft_from(model, states.rows().copy())


def _draft_alone(path: Path) -> None:
    """Draft with layers in a file without their model, from features of zeros."""
    try:
        weights = ZeroWeights()
    except UnsupportedBuild:
        with _planned(path, mtp=True) as model:
            _read_and_write(model)
            _open_mtp(model).close()
        return
    try:
        with Model(path, memory_map=False, repack=False, weights=weights, vetted=False, mtp=True) as model:
            _read_and_write(model)
            width = int(llama_cpp.llama_model_n_embd(model.handle))
            _draft_from(model, np.zeros((2, width), dtype=np.float32))
    finally:
        weights.close()


def _draft_from(model: Model, features: FloatArray) -> None:
    """Draft two tokens, and then two from the features that the layer computes of these."""
    small = _open_mtp(model)
    for start in (0, 2):
        small.decode(replace(TokenBatch.run([0, 0], start, n_sequences=1, logits="all"), features=features))
        small.logits()
        features = small.features(2)
    small.close()


def _read_and_write(model: Model) -> None:
    """Tokenize some texts, and ask for the text of every token."""
    vocabulary = model.vocabulary
    for text in _TEXTS:
        for control in (False, True):
            vocabulary.tokenize(text, control=control, bos=True)
    for token in range(vocabulary.n_tokens):
        vocabulary.piece(token, control=True)


def _planned(path: Path, *, mtp: bool = False) -> Model:
    return Model(path, memory_map=False, repack=False, allocate=False, vetted=False, mtp=mtp)


def _open(model: Model, *observers: GraphObserver) -> Context:
    return Context(
        model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1, observers=observers
    )


def _embeds(path: Path) -> bool:
    return embedding_shape(read_header(path)) is not None


def _open_embedding(model: Model) -> EmbeddingContext:
    return EmbeddingContext(model, n_cells=256, n_rows=64, n_sequences=2, n_threads=1)


def _open_mtp(model: Model) -> MTPContext:
    return MTPContext(model, n_cells=256, n_sequences=1, n_threads=1)


def _open_head(path: Path, target: Path) -> None:
    """Set up a head beside its target, whose matrices it may borrow, and draft with it."""
    with ExitStack() as stack:
        try:
            # Closed after the models whose tensors they hold.
            models = [_with_zeros(each, stack) for each in (path, target)]
        except UnsupportedBuild:
            with _planned(path) as model, _planned(target) as large:
                _read_and_write(model)
                head_context(model, _open(large), n_cells=256, n_sequences=1, n_threads=1).close()
            return
        model, large = models
        _read_and_write(model)
        beside = _open(large)
        small = head_context(model, beside, n_cells=256, n_sequences=1, n_threads=1)
        beside.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="last"))
        draft_from_zeros(small, 2)
        small.close()
        beside.close()


def _with_zeros(path: Path, stack: ExitStack) -> Model:
    """A model with zeros for its weights, until the stack is closed.

    Raises:
        UnsupportedBuild: this llama.cpp build is not as expected.
    """
    weights = ZeroWeights()
    stack.callback(weights.close)
    return stack.enter_context(Model(path, memory_map=False, repack=False, weights=weights, vetted=False))


class ReadingOrder(GraphObserver):
    """Observes the order in which passes read the matrices of layers.

    Attributes:
        names: of the matrices, in that order; empty if it was not the same in all passes.
    """

    def __init__(self, tensors: Mapping[str, Address]) -> None:
        self.watch = new_watch()
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
