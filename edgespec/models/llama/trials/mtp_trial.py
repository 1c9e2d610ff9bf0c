"""The child's part of trying MTP layers: a tiny model drafts with its own, and is compared with NumPy.

Run by `processes.trial` for `support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from edgespec.models.llama.heads.comparison import outcome, tree_fault
from edgespec.models.llama.heads.context import MTPContext
from edgespec.models.llama.heads.last_states import LastStates
from edgespec.models.llama.heads.reference import FloatArray, ReferenceMTPLayer, random_weights
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.trials.tiny_hybrid import MTP_SHAPE, write_tiny_hybrid

_TEXT = (1, 40, 50, 60, 70, 80)
_CHILDREN = (90, 100)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Try what drafting with MTP layers expects of the build.

    Returns:
        What is wrong as "error", or nothing.
    """
    del request
    return outcome(_compare, "one")


def _compare(folder: Path) -> str:
    """Describe the differences between the build and NumPy; empty if there are none."""
    path = folder / "tiny.gguf"
    weights = random_weights(MTP_SHAPE.tensors, np.random.default_rng(2))
    write_tiny_hybrid(path, gguf.GGMLQuantizationType.F32, lambda values: None, weights)
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    embedding, output = (np.array(written[f"{name}.weight"]) for name in ("token_embd", "output"))
    with Model(path, repack=False, vetted=False, mtp=True) as model:  # made here, and this is a child process
        plain, shown = (
            Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1) for _ in range(2)
        )
        states = LastStates(MTP_SHAPE.width)
        states.attach(shown)
        logits = []
        for context in (plain, shown):
            context.decode(TokenBatch.run(_TEXT, 0, 1, "all"))
            logits.append(context.logits().copy())
        hidden: FloatArray = states.rows().copy()
        if not np.array_equal(logits[0], logits[1]):
            return "a model that shows its last states computes something else"
        if np.abs(hidden @ output.T - logits[0]).max() > 1e-2 * np.abs(logits[0]).max():
            return "a model shows other states than its last ones"
        small = MTPContext(model, n_cells=256, n_sequences=4, n_threads=1)
        reference = ReferenceMTPLayer(MTP_SHAPE, weights, embedding, output)
        return tree_fault(small, reference, _TEXT, _CHILDREN, hidden[:-1])
