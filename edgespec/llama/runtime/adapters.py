"""LoRA adapters: small files that change a model's weights where they are used (Hu et al., 2021)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp

from edgespec.errors import ModelFileError
from edgespec.llama.runtime.backend import log_lines
from edgespec.llama.runtime.model import Model


def load_adapter(model: Model, path: Path) -> Any:
    """An adapter's handle, for `Context.adapt`; llama.cpp frees it with the model.

    Raises:
        ModelFileError: llama.cpp cannot apply it to this model.
    """
    # Adapters go to plain memory where a matrix is in one of the layouts that are offered.
    with log_lines() as log, model.kernels.offered():
        handle = llama_cpp.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not handle:
        raise ModelFileError(
            f"The LoRA adapter '{path}' cannot be applied to '{model.path.name}': {log.cause()}.",
            "Use an adapter made for this model.",
        )
    return handle
