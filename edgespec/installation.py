"""Commands that install llama.cpp again, for hints: only those that exist where EdgeSpec is installed."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "scripts" / "setup.py"


def install_command(*, rebuild: bool = False, environment: str = "") -> str:
    """Return a shell command that installs llama.cpp: by scripts/setup.py in a checkout, by pip elsewhere.

    Args:
        rebuild: compile it even if it is installed.
        environment: variables for the compiler, which scripts/setup.py finds by itself.
    """
    if _SCRIPT.exists():
        return f"python3 {os.path.relpath(_SCRIPT)}{' --rebuild' if rebuild else ''}"
    package = _llama_cpp()
    if not rebuild:
        return f"pip install '{package}'"
    return (
        f'{environment}{" " if environment else ""}CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_RPC=ON" pip install '
        f"--force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python '{package}'"
    )


def _llama_cpp() -> str:
    """Return the requirement of this version of EdgeSpec."""
    try:
        required = metadata.requires("edgespec") or []
    except metadata.PackageNotFoundError:
        required = []
    return next((name for name in required if re.match("llama.cpp.python", name)), "llama-cpp-python")
