"""LoRA adapters, as they are named and as their files describe them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.base.option import named
from edgespec.errors import ModelFileError, UsageError
from edgespec.files.user_folders import expanded
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader


@dataclass(frozen=True)
class Adapter:
    header: GGUFHeader
    scale: float  # how strongly it changes the model; 1 is as it was trained


def read_adapters(names: Sequence[str], target: GGUFHeader) -> list[Adapter]:
    """The adapters that are named as FILE or FILE:SCALE.

    Raises:
        UsageError: a scale is out of range.
        ModelFileError: a file is missing, damaged, no adapter, or one for another kind of model.
    """
    return [_read(*file_and_scale(name), target) for name in names]


def refuse_streaming() -> UsageError:
    """The error for adapters of a model whose weights are not all in memory."""
    return UsageError(
        "LoRA adapters need all weights in memory, but this model's are streamed from disk.",
        f"Leave out {named('lora')}, merge the adapter into the model, or raise {named('memory')}.",
    )


def file_and_scale(name: str) -> tuple[Path, float]:
    """The parts of FILE or FILE:SCALE; raises UsageError if the scale is out of range."""
    file, colon, scale = name.rpartition(":")
    try:
        number = float(scale) if colon else 1.0
    except ValueError:  # the colon belongs to the path
        return expanded(name), 1.0
    if not math.isfinite(number) or abs(number) > 100:
        raise UsageError(f"The scale of LoRA adapter {file} must be from -100 to 100, not {scale}.")
    return expanded(file if colon else name), number


def _read(path: Path, scale: float, target: GGUFHeader) -> Adapter:
    header = read_header(path)
    if not header.is_adapter:
        raise ModelFileError(
            f"{path} is a GGUF file but not a LoRA adapter.",
            "Convert the adapter with llama.cpp's convert_lora_to_gguf.py.",
        )
    if header.architecture != target.architecture:
        raise ModelFileError(
            f"The LoRA adapter {path} is for {header.architecture} models, and {target.path.name} is a "
            f"{target.architecture} model.",
            "Use an adapter made for this model.",
        )
    return Adapter(header, scale)
