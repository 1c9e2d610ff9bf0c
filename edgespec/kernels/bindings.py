"""llama-cpp-python's bindings of llama.cpp's functions, without its classes on top of them.

The classes take half as long to import as the rest of an engine: they bring Jinja, a database and a cache.
EdgeSpec needs none of them, and every child that tries a file or reads an image would wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from edgespec.base.prebuilt import prepare_loading

_PACKAGE, _CLASSES = "llama_cpp", "llama_cpp.llama"


@contextmanager
def without_classes() -> Iterator[None]:
    """Import llama-cpp-python, or modules of it, without its classes in the block.

    Nobody else sees that: who imports the package later gets it as a whole, with the same bindings.
    """
    if _PACKAGE in sys.modules:
        yield
        return
    sys.modules[_CLASSES] = ModuleType(_CLASSES)
    try:
        yield
    finally:
        for name in (_PACKAGE, _CLASSES):
            sys.modules.pop(name, None)


prepare_loading()
with without_classes():
    import llama_cpp
    from llama_cpp._ctypes_extensions import load_shared_library

__all__ = ["llama_cpp", "load_shared_library", "without_classes"]
