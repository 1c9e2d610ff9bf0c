"""Weights that are all zero and take neither memory nor reading: for trying whether a model computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import UnbackedBufferType
from edgespec.models.llama.runtime.residency import AllInMemory, BufferTypes


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
            BackendError: llama.cpp could not create their buffers.
        """
        if self._unbacked.error is not None:
            raise BackendError(f"No address space: {self._unbacked.error}.") from self._unbacked.error
        self._unbacked.finalize()

    def close(self) -> None:
        """Release the address space, after the model has been freed."""
        self._unbacked.close()
