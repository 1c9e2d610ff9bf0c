"""Functions of the compiled library that need none of its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.kernels.native.build import library_path


def compiled_functions(
    declared: Mapping[str, tuple[Any, Sequence[Any]]], callback: str = ""
) -> dict[str, Any] | None:
    """Functions by name, without the library's prefix; None if it was not compiled.

    Whether its kernels can be used here plays no part.

    Args:
        declared: type of the result and of the arguments.
        callback: the name of a function whose address is wanted instead; empty for none.
    """
    path = library_path()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        found: dict[str, Any] = {
            name: ctypes.CFUNCTYPE(result, *arguments)((f"edgespec_{name}", library))
            for name, (result, arguments) in declared.items()
        }
        if callback:
            found[callback] = ctypes.cast(library[f"edgespec_{callback}"], ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    return found
