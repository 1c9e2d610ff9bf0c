"""The child process of quantize.py: llama.cpp's quantizer, run once.

Its argument is a JSON object: `target` and `partial` (paths), `ftype` (the name of a constant of llama.cpp)
and `threads` (0: all).

Prints one JSON object: empty when the file `partial` is written and loads, otherwise `stage` (where
it went wrong: import, read, quantize, write or check) and what is known about it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR; llama-cpp-python has no name for it


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Do what `request` asks. Returns what went wrong; empty if nothing did."""
    try:
        from edgespec.kernels.bindings import llama_cpp
        from edgespec.kernels.ggml.functions import load_backends
    except (ImportError, OSError, RuntimeError) as error:
        return {"stage": "import", "reason": str(error)}

    errors: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, _: Any) -> None:
        if level == _LOG_LEVEL_ERROR:
            errors.append(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(collect, None)
    load_backends()
    partial = Path(request["partial"])

    if not (target := _load(llama_cpp, request["target"], vocab_only=True)):
        return {"stage": "read", "reason": _reason(errors)}
    llama_cpp.llama_model_free(target)
    status = _quantize(llama_cpp, request)
    if not _is_complete(partial) and (status == 0 or "iostream" in _reason(errors)):
        return {"stage": "write"}
    if status != 0:
        return {"stage": "quantize", "reason": _reason(errors)}
    model = _load(llama_cpp, request["partial"], vocab_only=False)
    if not model:
        return {"stage": "check", "reason": _reason(errors)}
    llama_cpp.llama_model_free(model)
    return {}


def _load(llama_cpp: Any, path: str, *, vocab_only: bool) -> Any:
    """Load a model cheaply: tensors stay on disk, mapped, and nothing is repacked."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = vocab_only
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False
    return llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)


def _quantize(llama_cpp: Any, request: dict[str, Any]) -> int:
    """Returns 0 when llama.cpp saw no error."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = request["threads"]
    parameters.ftype = getattr(llama_cpp, request["ftype"])
    parameters.allow_requantize = True
    status: int = llama_cpp.llama_model_quantize(
        os.fsencode(request["target"]), os.fsencode(request["partial"]), ctypes.byref(parameters)
    )
    return status


def _is_complete(path: Path) -> bool:
    """True if every write went through.

    llama.cpp does not notice a full disk, but it writes the header last, and then cannot.
    """
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _reason(errors: list[str]) -> str:
    """llama.cpp's first message, without its functions' names; the later ones repeat it."""
    text = errors[0].strip() if errors else "no reason given"
    return re.sub(r"^\w+: (error loading model: |failed to quantize: )?", "", text)


def main() -> None:
    """Run the request that is the only argument, and print the outcome."""
    print(json.dumps(run(json.loads(sys.argv[1]))))
