"""The placement of a model's layers on ggml's devices: graphics cards, or other machines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.kernels import ggml
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml import Address
from edgespec.llama.runtime.weight_store import BufferTypes
from edgespec.models.gguf.layers import pattern_of

# Where the output stays here, neither logits nor the embeddings of tokens cross the link to a device.
_HERE = r"^(token_embd|output)\."


@dataclass(frozen=True)
class DeviceLayers:
    """The last layers of a model, on devices, or what is left of them without some of their weights."""

    devices: tuple[Address, ...] = ()  # ggml's, in the order of the layers
    counts: tuple[int, ...] = ()  # how many layers each of them gets; at least one
    output: bool = False  # whether the output, which makes logits, is on the last device too
    kept_names: tuple[str, ...] = ()  # of weights of these layers that stay on this machine's processor

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Address, int]],
        *,
        output: bool = False,
        kept_names: tuple[str, ...] = (),
    ) -> DeviceLayers:
        """Place this many layers on each of these devices."""
        devices, counts = (device for device, _ in pairs), (count for _, count in pairs)
        return cls(tuple(devices), tuple(counts), output, kept_names)

    @property
    def n_gpu_layers(self) -> int:
        """llama.cpp\'s number of layers on devices, where the output counts as one."""
        return sum(self.counts) + 1 if self.devices else 0

    def amend(self, params: Any, mtp_layers: Sequence[int] = ()) -> tuple[BufferTypes, object]:
        """Name the devices and their shares in the parameters of a model.

        Without devices, llama.cpp would take all that it finds, for large passes at least.

        Args:
            mtp_layers: the numbers of layers for multi-token prediction. llama.cpp counts them among the last
                layers, and they stay here.

        Returns:
            Buffer types of what stays here, and what has to live until the model is loaded.
        """
        table = (ctypes.c_void_p * (len(self.devices) + 1))(*self.devices, None)
        shares = (ctypes.c_float * max(llama_cpp.llama_max_devices(), 1))(*self.counts)
        params.devices = ctypes.cast(table, ctypes.c_void_p)
        params.n_gpu_layers = self.n_gpu_layers + (len(mtp_layers) if self.devices else 0)
        here: BufferTypes = []
        if self.devices:
            shares[len(self.counts) - 1] += 1 + len(mtp_layers)  # one is the output
            params.tensor_split = shares
            stays = [_HERE] if not self.output else []
            stays += [rf"^blk\.{layer}\." for layer in mtp_layers]
            stays += pattern_of(self.kept_names)
            if stays:
                # The processor's own type lets the loader choose a kernel layout for what stays here.
                own = ggml.functions()["ggml_backend_cpu_buffer_type"]()
                here += [(pattern, own) for pattern in stays]
        return here, (table, shares)


ON_PROCESSOR = DeviceLayers()
"""No layers on devices, and no other use of them."""
