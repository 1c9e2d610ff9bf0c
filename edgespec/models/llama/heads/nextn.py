"""llama.cpp's functions for draft heads, which are no part of its C interface.

They are C++ functions, so their names in the library depend on the compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llama_cpp

from edgespec.kernels.ggml import UnsupportedBuild

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


def keep_features(context: Any) -> None:
    """Make a context keep the features of the rows whose outputs are wanted.

    Raises:
        UnsupportedBuild: this build cannot.
    """
    _function("set", None, (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool))(context, True, True)


def keep_states(context: Any) -> None:
    """Have a context keep the last states of all rows, and compute its logits as before.

    Raises:
        UnsupportedBuild: this build cannot.
    """
    _function("set", None, (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool))(context, True, False)


def features_address(context: Any) -> int:
    """The address of the features, or the last states, of the last call; 0 if there are none.

    Raises:
        UnsupportedBuild: this build has none.
    """
    return int(_function("get", ctypes.c_void_p, (ctypes.c_void_p,))(context) or 0)


@cache
def _function(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    library = llama_cpp.llama_cpp._lib
    for symbol in _NAMES[name]:
        try:
            return ctypes.CFUNCTYPE(result, *arguments)((symbol, library))
        except AttributeError:
            continue
    raise UnsupportedBuild(f"it has no {_NAMES[name][0]}")
