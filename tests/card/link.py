"""How fast the link to a card is, from pinned memory and from pageable: python -m tests.card.link NAME

Prints JSON: bytes per second by kind of memory and direction, and seconds of the smallest transfer.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from tests.card.device import card

_SIZES = (1 << 14, 1 << 20, 16 << 20, 128 << 20)
_TRIES = 5


def main() -> None:
    """Measure and print."""
    device = card(sys.argv[1])
    found: dict[str, Any] = {"pageable": _rates(device, pinned=False)}
    if pinned := _rates(device, pinned=True):
        found["pinned"] = pinned
    print(json.dumps(found))


def _rates(device: Address, *, pinned: bool) -> dict[str, dict[str, float]]:
    """Bytes per second by direction and by size; empty if the device pins no memory."""
    f = ggml.functions()
    host = f["ggml_backend_cpu_buffer_type"]()
    if pinned:
        host = f["ggml_backend_dev_host_buffer_type"](device)
        if not host:
            return {}
    here = f["ggml_backend_buft_alloc_buffer"](host, max(_SIZES))
    there = f["ggml_backend_buft_alloc_buffer"](f["ggml_backend_dev_buffer_type"](device), max(_SIZES) + 4096)
    f["ggml_backend_buffer_clear"](here, 1)
    source = f["ggml_backend_buffer_get_base"](here)
    rates: dict[str, dict[str, float]] = {"to the card": {}, "from it": {}}
    with ggml.ScratchContext(len(_SIZES)) as scratch:
        for size in _SIZES:
            tensor = scratch.tensor(ggml.F32, (size // 4,))
            f["ggml_backend_tensor_alloc"](there, tensor, f["ggml_backend_buffer_get_base"](there))
            for way, copy in (
                ("to the card", "ggml_backend_tensor_set"),
                ("from it", "ggml_backend_tensor_get"),
            ):
                rates[way][str(size)] = size / _best(lambda: f[copy](tensor, source, 0, size))  # noqa: B023
    f["ggml_backend_buffer_free"](there)
    f["ggml_backend_buffer_free"](here)
    return rates


def _best(copy: Any) -> float:
    taken = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        copy()
        taken.append(time.perf_counter() - begun)
    return min(taken)


if __name__ == "__main__":
    main()
