"""llama.cpp's functions for draft heads, which are no part of its C interface.

They are C++ functions, so their names in the library depend on the compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from edgespec.errors import BackendError
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.runtime.context import Context, FloatArray

# Each as it would be named in C, and as GCC and Clang, and MSVC name it.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "set": (
        "llama_set_embeddings_nextn",
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    "get": (
        "llama_get_embeddings_nextn",
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    ),
}


def check() -> None:
    """Make sure that this build has these functions.

    Raises:
        UnsupportedBuild: it lacks one.
    """
    for name in _NAMES:
        _function(name, None, ())


def keep_features(context: Context) -> None:
    """Make a context keep the features of the rows whose outputs are wanted.

    Raises:
        UnsupportedBuild: this build cannot.
    """
    _function("set", None, (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool))(context.handle, True, True)


def keep_states(context: Context) -> None:
    """Have a context keep the last states of all rows, and compute its logits as before.

    Raises:
        UnsupportedBuild: this build cannot.
    """
    _function("set", None, (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool))(context.handle, True, False)


def kept_rows(context: Context, rows: int, width: int, what: str) -> FloatArray:
    """(rows, width) of the first rows that the last call of a context has kept: a view, until the next one.

    Args:
        what: they are, for people.

    Raises:
        BackendError: there are none.
        UnsupportedBuild: this build has none.
    """
    context.synchronize()
    start = _function("get", ctypes.c_void_p, (ctypes.c_void_p,))(context.handle)
    if not start:
        raise BackendError(f"llama.cpp has no {what} to read.")
    memory = (ctypes.c_float * (rows * width)).from_address(start)
    return np.frombuffer(memoryview(memory), dtype=np.float32).reshape(rows, width)


@cache
def _function(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    library = llama_cpp.llama_cpp._lib
    for symbol in _NAMES[name]:
        try:
            return ctypes.CFUNCTYPE(result, *arguments)((symbol, library))
        except AttributeError:
            continue
    raise UnsupportedBuild(f"it has no {_NAMES[name][0]}")
