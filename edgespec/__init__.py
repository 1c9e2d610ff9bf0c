"""EdgeSpec: run a GGUF model larger than memory at chat speed, with speculative token trees.

import edgespec

with edgespec.load("model.gguf", draft="small.gguf") as engine:
    for chunk in engine.stream("Why is the sky blue?"):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from edgespec.version import __version__

TYPE_CHECKING = False  # importing `typing` takes most of the time before the program can handle Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from edgespec.engine.embedder import Embedder
    from edgespec.engine.engine import Engine
    from edgespec.engine.sessions.session import Session
    from edgespec.errors import EdgeSpecError
    from edgespec.generation.config import GenerationConfig
    from edgespec.loading.embedder import load_embedder
    from edgespec.loading.embedder import open_embedder as open_embedder
    from edgespec.loading.load import load
    from edgespec.loading.load import open_engine as open_engine

__all__ = [
    "EdgeSpecError",
    "Embedder",
    "Engine",
    "GenerationConfig",
    "Session",
    "__version__",
    "load",
    "load_embedder",
]

_HOMES = {
    "EdgeSpecError": "edgespec.errors",
    "Embedder": "edgespec.engine.embedder",
    "Engine": "edgespec.engine.engine",
    "GenerationConfig": "edgespec.generation.config",
    "Session": "edgespec.engine.sessions.session",
    "load": "edgespec.loading.load",
    "load_embedder": "edgespec.loading.embedder",
    "open_embedder": "edgespec.loading.embedder",  # for the command line
    "open_engine": "edgespec.loading.load",  # for the command line
}


def __dir__() -> list[str]:
    """The public names, also those that are imported on first use."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import on first use: llama.cpp takes a fifth of a second, which `edgespec --help` must not."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute '{name}'")
    import importlib

    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        from edgespec.base.installation import install_command
        from edgespec.errors import BackendError

        raise BackendError(
            "llama-cpp-python is not installed.",
            f"Install it: {install_command()}",
        ) from error
    except (FileNotFoundError, RuntimeError) as error:
        if "shared library" not in str(error).lower():  # what llama-cpp-python says of llama.cpp's
            raise
        from edgespec.base.installation import install_command
        from edgespec.errors import BackendError

        raise BackendError(
            f"llama.cpp cannot be loaded: {error}.",
            f"Install the wheel edgespec-llama, or compile llama.cpp: {install_command(rebuild=True)}",
        ) from error
