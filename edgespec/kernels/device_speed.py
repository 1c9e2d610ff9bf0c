"""Measuring how fast devices multiply, and how far away they are: in a child process, which ggml may end.

The weights are zeros, which devices make themselves, so that nothing large crosses a network.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, rpc
from edgespec.kernels.ggml.buffer_types import device_named, pinned_buffer, pinned_memory_name
from edgespec.kernels.ggml.structs import Tensor
from edgespec.kernels.report import ROWS
from edgespec.processes.trial import attempt_in_child

# Square matrices, by side and number: a multiple of every block, and together larger than caches. Less where
# a device lends too little memory for that, or takes long.
_SHAPES = ((4096, 6), (4096, 2), (2048, 2), (1024, 2), (256, 2))
_UNKNOWN = 1 << 60  # free memory, where a device does not say how much that is
_TRIES = 3
_PRODUCT_TRIES = 6
_LONG_S = 0.1  # for a row: such a device computes in software, and large trees would take minutes
_CPU_S = 60.0
_PAYLOADS = (1 << 14, 1 << 17, 1 << 20, 1 << 24)  # bytes: activations of a row, of trees, and weights


class DeviceFailed(Exception):
    """llama.cpp cannot compute on a device; the text says how it ended."""


@dataclass(frozen=True)
class DeviceSpeed:
    """The measured speeds of a device."""

    seconds: tuple[float, ...]  # for a byte of weights of a type as in files, for each of ROWS
    # seconds in which so many bytes get there and back; empty for what is not on this machine
    transfer: Mapping[int, float] = field(default_factory=dict)
    unpinned: bool = False  # whether no memory could be pinned for it, although it has such memory


def measure_speeds(
    type_id: int, n_threads: int, *, endpoints: Sequence[str] = (), names: Sequence[str] = ()
) -> list[DeviceSpeed]:
    """Measure the speed of products by weights of a type.

    Args:
        type_id: ggml's number of the quantization.
        n_threads: for this machine's processor.
        endpoints: "host:port" of workers that can be reached and serve nobody now.
        names: of this machine's devices.

    Returns:
        For this machine's processor, then for each device of the workers, and then for each that was named.

    Raises:
        DeviceFailed: llama.cpp fails with one of them.
        InconclusiveTrial: the child process was killed, starved or refused memory.
    """
    request = {
        "endpoints": list(endpoints),
        "names": list(names),
        "type": type_id,
        "threads": n_threads,
    }
    subject = f"Computing on {', '.join([*endpoints, *names]) or 'this processor'}"
    verdict = attempt_in_child(__name__, request, subject=subject, cpu_s=_CPU_S * (1 + 2 * len(names)))
    if verdict.answer is None:
        raise DeviceFailed(verdict.detail or verdict.why)
    if missing := verdict.answer.get("missing"):
        raise DeviceFailed(f"there is no {missing}")
    return [
        DeviceSpeed(
            tuple(each["seconds"]), {int(n): s for n, s in each["transfer"].items()}, each["unpinned"]
        )
        for each in verdict.answer["devices"]
    ]


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The child's side."""
    f = ggml.functions()
    own = ggml.cpu_device()
    devices = [own] + [device for endpoint in request["endpoints"] for device in rpc.connect(endpoint)]
    near = []
    for name in request["names"]:
        device = device_named(name)
        if device is None:
            return {"missing": name}
        near.append(device)
    found = []
    for device in [*devices, *near]:
        backend = f["ggml_backend_dev_init"](device, None)
        if device == own:
            f["ggml_backend_cpu_set_n_threads"](backend, request["threads"])
        seconds = _seconds(device, backend, request["type"])
        transfer = transfer_times(device) if device in near else {}
        unpinned = device in near and refuses_to_pin(device)
        found.append({"seconds": seconds, "transfer": transfer, "unpinned": unpinned})
        f["ggml_backend_free"](backend)
    return {"devices": found}


def transfer_times(device: Address) -> dict[int, float]:
    """Seconds in which so many bytes get to a device and back: the median of a few tries.

    From memory that is pinned for the device, if it has such: llama.cpp keeps activations there.
    """
    f = ggml.functions()
    there = f["ggml_backend_dev_buffer_type"](device)
    host = f["ggml_backend_dev_host_buffer_type"](device) or f["ggml_backend_cpu_buffer_type"]()
    found = {}
    with ggml.ScratchContext(len(_PAYLOADS)) as scratch, ExitStack() as stack:
        buffer, here = (
            f["ggml_backend_buft_alloc_buffer"](kind, 2 * max(_PAYLOADS)) for kind in (there, host)
        )
        for allocated in filter(None, (buffer, here)):
            stack.callback(f["ggml_backend_buffer_free"], allocated)
        if not (buffer and here):
            raise MemoryError
        f["ggml_backend_buffer_clear"](here, 0)
        data = f["ggml_backend_buffer_get_base"](here)
        for n_bytes in _PAYLOADS:
            tensor = scratch.tensor(ggml.F32, (n_bytes // 4,))
            f["ggml_backend_tensor_alloc"](buffer, tensor, f["ggml_backend_buffer_get_base"](buffer))
            taken = []
            for _ in range(_TRIES):
                begun = time.perf_counter()
                f["ggml_backend_tensor_set"](tensor, data, 0, n_bytes)
                f["ggml_backend_tensor_get"](tensor, data, 0, n_bytes)
                taken.append(time.perf_counter() - begun)
            found[n_bytes] = statistics.median(taken)
    return found


def refuses_to_pin(device: Address) -> bool:
    """True if memory cannot be pinned for a device that has such memory."""
    buffer = pinned_buffer(device, max(_PAYLOADS))
    if buffer:
        ggml.functions()["ggml_backend_buffer_free"](buffer)
    return not buffer and bool(pinned_memory_name(device))


def _seconds(device: Address, backend: Address, type_id: int) -> list[float]:
    """Seconds for each byte of weights, for each of ROWS: the best of a few tries, without the transfers."""
    *larger, smallest = _SHAPES
    for side, count in larger:
        with suppress(_TooLarge):
            return _seconds_of(side, count, device, backend, type_id)
    return _seconds_of(*smallest, device, backend, type_id, accepted=True)


class _TooLarge(Exception):
    """Matrices that a device has no memory for, or takes too long for."""


def _seconds_of(
    side: int, count: int, device: Address, backend: Address, type_id: int, *, accepted: bool = False
) -> list[float]:
    """Seconds for each byte of such matrices, for each of ROWS.

    Args:
        accepted: use them even if they take too much memory or time.

    Raises:
        _TooLarge: they take too much.
    """
    f = ggml.functions()
    kind = f["ggml_backend_dev_buffer_type"](device)
    step = f["ggml_backend_buft_get_alignment"](kind)
    free = rpc.describe(device).free or _UNKNOWN
    with ggml.ScratchContext(2 * count + 1) as scratch, ExitStack() as stack:
        weights = [scratch.tensor(type_id, (side, side)) for _ in range(count)]
        values = [scratch.tensor(ggml.F32, (side, max(ROWS))) for _ in range(count + 1)]
        sizes = [f["ggml_backend_buft_get_alloc_size"](kind, tensor) for tensor in (*weights, *values)]
        starts = [0, *accumulate(-(-size // step) * step for size in sizes)]
        if starts[-1] + step > free and not accepted:
            raise _TooLarge
        # One buffer for everything, as each takes round trips.
        buffer = f["ggml_backend_buft_alloc_buffer"](kind, starts[-1] + step)
        if not buffer:
            raise MemoryError
        stack.callback(f["ggml_backend_buffer_free"], buffer)
        f["ggml_backend_buffer_clear"](buffer, 0)
        base = -(-f["ggml_backend_buffer_get_base"](buffer) // step) * step
        places = [base + start for start in starts]
        for weight, place in zip(weights, places, strict=False):
            f["ggml_backend_tensor_alloc"](buffer, weight, place)
        n_bytes: int = sum(f["ggml_nbytes"](weight) for weight in weights)
        taken: list[float] = []
        for rows in ROWS:
            taken.append(_best(backend, buffer, weights, places[count:], rows))
            if taken[0] > _LONG_S and not accepted:
                raise _TooLarge
        return [seconds / n_bytes for seconds in taken]


def _best(
    backend: Address, buffer: Address, weights: Sequence[Address], places: Sequence[Address], rows: int
) -> float:
    """Seconds of the products of all matrices in a row, the best of a few tries.

    Args:
        places: of the activations before and after each product.
    """
    f = ggml.functions()
    count = len(weights)
    with ggml.ScratchContext(2 * count + 2, 4 * count) as scratch:
        values = scratch.tensor(ggml.F32, (Tensor.from_address(weights[0]).ne[0], rows))
        f["ggml_backend_tensor_alloc"](buffer, values, places[0])
        for weight, place in zip(weights, places[1:], strict=False):
            values = f["ggml_mul_mat"](scratch.handle, weight, values)
            f["ggml_backend_tensor_alloc"](buffer, values, place)
        graph = f["ggml_new_graph_custom"](scratch.handle, 4 * count, False)
        f["ggml_build_forward_expand"](graph, values)
        first = ctypes.c_float()

        def finish() -> None:
            f["ggml_backend_tensor_get"](values, ctypes.addressof(first), 0, ctypes.sizeof(first))

        whole, transfers = [], []
        for _ in range(_PRODUCT_TRIES):
            begun = time.perf_counter()
            f["ggml_backend_graph_compute"](backend, graph)
            finish()
            computed = time.perf_counter()
            finish()
            whole.append(computed - begun)
            transfers.append(time.perf_counter() - computed)
        # Each the best of its own: a transfer that took long by chance would make the products look fast.
        return max(min(whole) - min(transfers), 1e-9)
