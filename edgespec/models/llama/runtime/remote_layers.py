"""A model whose last layers are on other machines, while its first ones and its vocabulary stay here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from edgespec.errors import EdgeSpecError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.models.llama.runtime.residency import AllInMemory, BufferTypes

# Logits are many numbers for each row, and cross no network; nor need the embeddings of tokens.
_HERE = r"^(token_embd|output)\."


class RemoteLayers(AllInMemory):
    """Gives a model's last layers to devices of other machines: a `Residency`.

    Args:
        devices: ggml's devices, in the order of the layers.
        counts: how many layers each of them gets.
        lost: gives an error if a machine is gone; called around every decode.
        release: ends the connections, once the model is freed.
    """

    def __init__(
        self,
        devices: Sequence[Address],
        counts: Sequence[int],
        *,
        lost: Callable[[], EdgeSpecError | None],
        release: Callable[[], None],
    ) -> None:
        self._devices = tuple(devices)
        self._counts = tuple(counts)
        self._lost = lost
        self._release = release

    @property
    def gpu_layers(self) -> int:
        """For llama.cpp, which counts the output as one more layer of the last device."""
        return sum(self._counts) + 1

    def failure(self) -> EdgeSpecError | None:
        """An error if a machine is gone."""
        return self._lost()

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Name the devices and their shares."""
        table = (ctypes.c_void_p * (len(self._devices) + 1))(*self._devices, None)
        shares = (ctypes.c_float * llama_cpp.llama_max_devices())(*self._counts)
        shares[len(self._counts) - 1] += 1  # the output
        params.devices = ctypes.cast(table, ctypes.c_void_p)
        params.tensor_split = shares
        # The processor's own type lets the loader choose a kernel layout for what stays here.
        own = ggml.functions()["ggml_backend_cpu_buffer_type"]()
        with super().loading(path, params, [*buffer_types, (_HERE, own)]) as load_path:
            yield load_path
        params.devices = params.tensor_split = None

    def close(self) -> None:
        """End the connections, after the model has been freed."""
        self._release()
