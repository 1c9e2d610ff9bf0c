"""A tiny Gemma 4 and its assistant, and what both compute.

The model's layers add little, so its next token depends mostly on the last one. The assistant is built, not
trained, to know as much: it passes the token's embedding on to a copy of the model's output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from tests.heads.eagle_file import FloatArray
from tests.heads.gemma_files import write_gemma
from tests.heads.gemma_reference import AssistantReference, GemmaReference, GemmaShape
from tests.tiny import N_VOCAB, add_vocabulary

TARGET = GemmaShape(
    width=256,
    hidden=512,
    heads=4,
    heads_kv=2,
    head=64,
    sliding_head=32,
    sliding=(True, True, False, True, True, False),
    window=24,
    n_vocab=N_VOCAB,
)
ASSISTANT = replace(TARGET, width=320, hidden=256, sliding=(True, True, False), target_width=TARGET.width)
_TYPE = gguf.GGMLQuantizationType.F16


@dataclass(frozen=True)
class TinyPair:
    """The files of a model and its assistant, and the same in NumPy."""

    target: Path
    assistant: Path
    target_reference: GemmaReference
    assistant_reference: AssistantReference


def write_pair(
    folder: Path, vocabulary_of: Path, *, damped: float = 0.02, target: GemmaShape = TARGET
) -> TinyPair:
    """Write a model and its assistant.

    Args:
        damped: scales what the model's layers add, and those of the assistant.
        target: the model's shape.
    """
    rng = np.random.default_rng(4)
    large, small = target.random(rng, damped), ASSISTANT.random(rng, damped)
    width = target.width
    projection = np.zeros_like(small["nextn.pre_projection.weight"])
    projection[:width, :width] = np.eye(width)
    output = np.zeros_like(small["token_embd.weight"])
    output[:, :width] = large["output.weight"] * large["output_norm.weight"]
    small |= {
        "nextn.pre_projection.weight": projection,
        "token_embd.weight": output,
        "output_norm.weight": np.ones_like(small["output_norm.weight"]),
    }
    # A little of the feature is mixed in, so that a wrong one would show.
    projection[width:, width:] = rng.standard_normal((ASSISTANT.width - width, width)) * width**-0.5
    output[:, width:] = rng.standard_normal((N_VOCAB, ASSISTANT.width - width)) * 0.02
    large, small = _rounded(large), _rounded(small)
    paths = [folder / f"{name}.gguf" for name in ("target", "assistant")]
    for path, shape, weights in zip(paths, (target, ASSISTANT), (large, small), strict=True):
        write_gemma(path, shape, weights, lambda writer: add_vocabulary(writer, vocabulary_of), _TYPE)
    references = (
        GemmaReference(target, large),
        AssistantReference(ASSISTANT, small, large["token_embd.weight"]),
    )
    return TinyPair(*paths, *references)


def _rounded(weights: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """Weights as they are in the file."""
    return {
        name: values if values.ndim == 1 else values.astype(np.float16).astype(np.float32)
        for name, values in weights.items()
    }
