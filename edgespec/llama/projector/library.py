"""llama.cpp's library for images, mtmd. Only child processes load it: it decodes what strangers made."""

from __future__ import annotations

import os
from types import ModuleType

from edgespec.prebuilt import VARIABLE as LLAMA_CPP_FOLDER

FOLDER = "MTMD_CPP_LIB"  # where the bindings look for it


class NoImageLibrary(Exception):
    """llama.cpp was compiled without the part that reads images, or it cannot be loaded."""


def load_library() -> ModuleType:
    """The bindings of the library, which is beside llama.cpp's own unless a person names another folder.

    Raises:
        NoImageLibrary: it is not there.
    """
    if FOLDER not in os.environ and LLAMA_CPP_FOLDER in os.environ:
        os.environ[FOLDER] = os.environ[LLAMA_CPP_FOLDER]
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError, AttributeError) as error:  # whatever loading a library raises
        raise NoImageLibrary(str(error)) from error
    return mtmd_cpp
