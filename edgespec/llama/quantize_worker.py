"""The child process of quantize.py: llama.cpp's quantizer, run once.

Its argument is a JSON object: `target` and `partial` (paths), `ftype` (the name of a constant of llama.cpp,
or null to keep the types), `dropped` (layers, in order) and `threads` (0: all).

Prints one JSON object: empty when the file `partial` is written and loads, otherwise `stage` (where
it went wrong: import, read, layers, quantize, write or check) and what is known about it.
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
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        return {"stage": "import", "reason": str(error)}

    errors: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, _: Any) -> None:
        if level == _LOG_LEVEL_ERROR:
            errors.append(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(collect, None)
    dropped: list[int] = request["dropped"]
    partial = Path(request["partial"])

    layers = _layer_count(llama_cpp, request["target"])
    if layers is None:
        return {"stage": "read", "reason": _reason(errors)}
    if dropped and (dropped[0] < 0 or dropped[-1] >= layers or len(dropped) == layers):
        return {"stage": "layers", "layers": layers}
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


def _layer_count(llama_cpp: Any, path: str) -> int | None:
    model = _load(llama_cpp, path, vocab_only=True)
    if not model:
        return None
    architecture = _metadata(llama_cpp, model, "general.architecture")
    layers = int(_metadata(llama_cpp, model, f"{architecture}.block_count") or 0)
    llama_cpp.llama_model_free(model)
    return layers


def _load(llama_cpp: Any, path: str, *, vocab_only: bool) -> Any:
    """Load a model cheaply: tensors stay on disk, mapped, and nothing is repacked."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = vocab_only
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False
    return llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)


def _metadata(llama_cpp: Any, model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def _quantize(llama_cpp: Any, request: dict[str, Any]) -> int:
    """Returns 0 when llama.cpp saw no error."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = request["threads"]
    if request["ftype"] is None:
        parameters.only_copy = True
    else:
        parameters.ftype = getattr(llama_cpp, request["ftype"])
        parameters.allow_requantize = True
    dropped = request["dropped"]
    if dropped:
        # llama.cpp wants them in order, with -1 at the end.
        parameters.prune_layers = (ctypes.c_int32 * (len(dropped) + 1))(*dropped, -1)
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
