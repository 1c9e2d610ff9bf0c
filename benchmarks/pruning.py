"""Models without some of their layers: drafters that agree with their targets less, and take less time."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from edgespec.base.prebuilt import prepare_loading


def write_pruned(model: Path, path: Path, layers: Iterable[int]) -> Path:
    """Write a copy of a model without these layers, counted from 0; all other weights are as they were.

    Raises:
        ValueError: llama.cpp cannot leave them out.
    """
    prepare_loading()
    import llama_cpp

    left_out = sorted({*layers})
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.only_copy = True
    parameters.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*left_out, -1)  # -1 ends the list
    if llama_cpp.llama_model_quantize(os.fsencode(model), os.fsencode(path), ctypes.byref(parameters)):
        raise ValueError(f"{model} cannot be written without layers {left_out}")
    return path
