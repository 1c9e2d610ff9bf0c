"""Calls of llama.cpp that fail with an error where ggml would end the process: see guard.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml import Address, exported, functions
from edgespec.kernels.native.library import compiled_functions

_P = ctypes.c_void_p
_SAID = 2048  # bytes, of a message
_BATCH_BYTES = 56  # of edgespec_batch
_VULKAN = "vk::"  # how the names of its functions begin, which exceptions tell

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "guard_enter": (None, []),
    "guard_leave": (None, []),
    "guard_stopped": (ctypes.c_int, []),
    "abort_before": (None, [_P]),
    "guarded_batch": (ctypes.c_int32, [_P, _P, _P, ctypes.c_char_p, ctypes.c_size_t]),
    "guarded": (_P, [_P, _P, ctypes.c_char_p, ctypes.c_size_t]),
    "guarded_transfer": (None, [_P, _P, _P, *[ctypes.c_size_t] * 2, ctypes.c_char_p, ctypes.c_size_t]),
}


class CallFailed(Exception):
    """A device has failed within a call; the text is what its backend said."""


class CallGuard:
    """Makes calls that raise `CallFailed` where a device fails.

    Args:
        functions: of the compiled library.
    """

    def __init__(self, functions: dict[str, Any]) -> None:
        self._f = functions

    def batch(self, function: Any, context: Address, batch: Any) -> int:
        """Call `llama_decode` or `llama_encode`, and return its code.

        Raises:
            CallFailed: a device has failed.
        """
        said = ctypes.create_string_buffer(_SAID)
        address = ctypes.cast(function, _P)
        code: int = self._f["guarded_batch"](address, context, ctypes.addressof(batch), said, _SAID)
        _require_silence(said)
        return code

    def context(self, function: Any, context: Address) -> Address | None:
        """Call a function that takes a context, and return the address that it returns, if any.

        Raises:
            CallFailed: a device has failed.
        """
        said = ctypes.create_string_buffer(_SAID)
        found: Address | None = self._f["guarded"](ctypes.cast(function, _P), context, said, _SAID)
        _require_silence(said)
        return found

    def transfers(self, function: Any) -> Callable[[Address, Address, int, int], None]:
        """`ggml_backend_tensor_get` or `ggml_backend_tensor_set`, raising CallFailed where a device fails.

        Callbacks call them within a pass, where nothing else catches what a backend throws.
        """
        address = ctypes.cast(function, _P)

        def transfer(tensor: Address, data: Address, offset: int, n_bytes: int) -> None:
            said = ctypes.create_string_buffer(_SAID)
            self._f["guarded_transfer"](address, tensor, data, offset, n_bytes, said, _SAID)
            _require_silence(said)

        return transfer

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A block in which what would end the process is an exception, which llama.cpp catches itself."""
        self._f["guard_stopped"]()
        self._f["guard_enter"]()
        try:
            yield
        finally:
            self._f["guard_leave"]()

    def stopped(self, logged: Iterable[str]) -> bool:
        """True if the last block was ended by a device, and not by what llama.cpp refuses itself.

        Args:
            logged: lines of errors, where llama.cpp repeats what Vulkan's exceptions say.
        """
        return bool(self._f["guard_stopped"]()) or any(_VULKAN in line for line in logged)


def _require_silence(said: ctypes.Array[ctypes.c_char]) -> None:
    if text := said.value.decode("utf-8", "replace"):
        raise CallFailed(text)


@cache
def call_guard() -> CallGuard | None:
    """The guard; None if it was not compiled, or does not fit this build.

    The first call puts it in force, and has ggml's transfers called by it from then on.
    """
    found = compiled_functions(_FUNCTIONS, "on_abort")
    if found is None or ctypes.sizeof(llama_cpp.llama_batch) != _BATCH_BYTES:
        return None
    try:
        set_callback = ctypes.CFUNCTYPE(_P, _P)(exported("ggml_set_abort_callback"))
    except AttributeError:
        return None
    found["abort_before"](set_callback(found["on_abort"]))
    guard, public = CallGuard(found), functions()
    for name in ("ggml_backend_tensor_get", "ggml_backend_tensor_set"):
        public[name] = guard.transfers(public[name])
    return guard
