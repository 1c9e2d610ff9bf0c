"""Computing in a thread of its own, where other libraries use the processor's tiles, too.

ggml's AMX kernels configure the tiles of Intel's matrix units once in each thread, and rely on that from then
on. Other libraries, such as oneDNN within PyTorch, configure them for their own products and release them
afterwards. ggml's next product in the same thread is then an illegal instruction, which ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from edgespec.kernels.layouts import ModelKernels

_OTHERS = ("torch", "tensorflow", "onnxruntime", "openvino")  # libraries whose products may use tiles
_TILES = "AMX"  # ggml's name of the layout whose kernels use them


class ComputeThread:
    """Calls functions of llama.cpp that compute, in a thread of their own where that is necessary.

    The thread starts with the first call that needs it.

    Args:
        kernels: of the model that is computed.

    Attributes:
        planner: of the graphs that these functions compute; None if ggml alone plans them.
    """

    def __init__(self, kernels: ModelKernels) -> None:
        self._uses_tiles = any(layout.name == _TILES for layout in kernels.layouts)
        self.planner = kernels.new_planner()
        self._executor: ThreadPoolExecutor | None = None

    @property
    def needed(self) -> bool:
        """True if another library in this process may use tiles besides ggml."""
        return self._uses_tiles and any(name in sys.modules for name in _OTHERS)

    def call(self, function: Callable[..., int], *arguments: object) -> int:
        """The function's result.

        Signal handlers must be deferred (see signals), as an exception would not end the call.
        """
        if not self.needed:
            return self._planned(function, *arguments)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="edgespec-compute")
        # The log's lines are kept for the caller.
        return self._executor.submit(copy_context().run, self._planned, function, *arguments).result()

    def _planned(self, function: Callable[..., int], *arguments: object) -> int:
        if self.planner is None:
            return function(*arguments)
        with self.planner:
            return function(*arguments)

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
