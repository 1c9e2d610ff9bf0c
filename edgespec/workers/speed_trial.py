"""Measuring how fast this machine and workers multiply: run in a child process, which ggml may end.

The weights are zeros, which devices make themselves, so that nothing large crosses the network.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from edgespec.errors import WorkerError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, rpc
from edgespec.kernels.report import ROWS
from edgespec.processes.trial import attempt_in_child

_SIDE = 4096  # of a square matrix: a multiple of every block
_MATRICES = 6  # together larger than caches
_TRIES = 3
_CPU_S = 60.0


def measure_speeds(endpoints: Sequence[str], type_id: int, n_threads: int) -> list[tuple[float, ...]]:
    """Seconds of products by weights of a type, relative to their bytes, for each of ROWS.

    Args:
        endpoints: "host:port" of workers that can be reached and serve nobody now.
        type_id: ggml's number of the quantization.
        n_threads: for this machine's processor.

    Returns:
        For this machine, with weights as they are in files, and then for each device of the workers.

    Raises:
        WorkerError: llama.cpp fails with one of them.
    """
    request = {"endpoints": list(endpoints), "type": type_id, "threads": n_threads}
    verdict = attempt_in_child(__name__, request, cpu_s=_CPU_S)
    if verdict.answer is None:
        raise WorkerError(
            f"llama.cpp cannot compute on the workers {', '.join(endpoints)}: trying it, it ended "
            f"({verdict.detail or verdict.why}).",
            "Look at their own messages, and install the same version of EdgeSpec everywhere.",
        )
    return [tuple(row) for row in verdict.answer["seconds"]]


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The child's side."""
    f = ggml.functions()
    own = ggml.cpu_device()
    devices = [own] + [device for endpoint in request["endpoints"] for device in rpc.connect(endpoint)]
    found = []
    for device in devices:
        backend = f["ggml_backend_dev_init"](device, None)
        if device == own:
            f["ggml_backend_cpu_set_n_threads"](backend, request["threads"])
        found.append([_seconds(device, backend, request["type"], rows) for rows in ROWS])
        f["ggml_backend_free"](backend)
    return {"seconds": found}


def _seconds(device: Address, backend: Address, type_id: int, rows: int) -> float:
    """Seconds for each byte of weights, the best of a few tries, without the way there and back."""
    f = ggml.functions()
    kind = f["ggml_backend_dev_buffer_type"](device)
    with ExitStack() as stack:
        scratch = stack.enter_context(ggml.ScratchContext(3 * _MATRICES + 2, 4 * _MATRICES))

        def placed(tensor: Address) -> Address:
            size = f["ggml_backend_buft_get_alloc_size"](kind, tensor)
            buffer = f["ggml_backend_buft_alloc_buffer"](kind, size)
            if not buffer:
                raise MemoryError
            stack.callback(f["ggml_backend_buffer_free"], buffer)
            f["ggml_backend_buffer_clear"](buffer, 0)
            f["ggml_backend_tensor_alloc"](buffer, tensor, f["ggml_backend_buffer_get_base"](buffer))
            return tensor

        values = placed(scratch.tensor(ggml.F32, (_SIDE, rows)))
        weights = [placed(scratch.tensor(type_id, (_SIDE, _SIDE))) for _ in range(_MATRICES)]
        for weight in weights:
            values = placed(f["ggml_mul_mat"](scratch.handle, weight, values))
        graph = f["ggml_new_graph_custom"](scratch.handle, 4 * _MATRICES, False)
        f["ggml_build_forward_expand"](graph, values)
        first = ctypes.c_float()

        def finish() -> None:
            f["ggml_backend_tensor_get"](values, ctypes.addressof(first), 0, ctypes.sizeof(first))

        best = float("inf")
        for _ in range(_TRIES):
            begun = time.perf_counter()
            f["ggml_backend_graph_compute"](backend, graph)
            finish()
            computed = time.perf_counter()
            finish()
            best = min(best, computed - begun - (time.perf_counter() - computed))
        n_bytes: int = sum(f["ggml_nbytes"](weight) for weight in weights)
        return max(best, 1e-9) / n_bytes
