"""Models with zeros for their weights, and what is tried with any model that a child process loads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import MemoryLimitError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnbackedBufferType, UnsupportedBuild
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import AllInMemory, BufferTypes

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
