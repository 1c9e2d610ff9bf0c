"""The child's part of trying block heads: tiny ones draft a block each, and are compared with NumPy.

Run by `processes.trial` for `heads.support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.models.llama.heads.blocks.context import BlockContext
from edgespec.models.llama.heads.blocks.reference import BlockShape, ReferenceBlockHead
from edgespec.models.llama.heads.blocks.sample import SHAPE, write_block_head
from edgespec.models.llama.heads.comparison import near, outcome
from edgespec.models.llama.heads.reference import FloatArray
from edgespec.models.llama.heads.sample import N_VOCAB, WIDTH, add_bytes, write_target
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model

_TEXT = (1, 40, 50, 60, 70, 80)
_KINDS = (
    SHAPE,
    replace(SHAPE, causal=True),
    replace(SHAPE, markov=True, from_anchor=True),
    replace(SHAPE, top_k=4),
)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Try what drafting with block heads expects of the build.

    Returns:
        What is wrong as "error", or nothing.
    """
    del request
    return outcome(_compare, "a block head")


def _compare(folder: Path) -> str:
    """Describe the differences between the build and NumPy; empty if there are none."""
    rng = np.random.default_rng(1)
    embedding = rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
    path = write_target(folder / "target.gguf", embedding, rng)
    tap = LayerTap(SHAPE.layers, WIDTH)
    with Model(path, repack=False, vetted=False) as target:  # made here, and this is a child process
        large = Context(
            target, n_cells=256, n_rows=64, n_outputs=64, n_sequences=4, n_threads=1, observers=[tap]
        )
        large.decode(TokenBatch.run(_TEXT, 0, 1, "last"))
        for number, shape in enumerate(_KINDS):
            weights = shape.random(rng)
            head = write_block_head(folder / f"head-{number}.gguf", shape, weights, add_bytes)
            with Model(head, repack=False, vetted=False) as model:
                small = BlockContext(model, large, n_cells=256, n_sequences=4, n_threads=1)
                if wrong := _fault(
                    small, ReferenceBlockHead(shape, weights, embedding, embedding), shape, tap.rows()
                ):
                    return wrong
    return ""


def _fault(small: BlockContext, reference: ReferenceBlockHead, shape: BlockShape, hidden: FloatArray) -> str:
    """The difference of one head: two blocks after one another, the second behind more text."""
    read = 0
    for known in (3, 5):
        small.decode(small.sequence_batch(hidden[read:known], read))
        read = known
        block = small.block_batch(_TEXT[known], known)
        small.decode(block)
        tokens = block.tokens.tolist()
        expected = (reference.biased if shape.markov else reference.block)(hidden[:known], tokens)
        if not near(small.logits(), expected):
            return "its block heads compute something else than is expected"
        if shape.top_k and not _pairs_agree(small.pairs(1), reference.pairs(hidden[:known], tokens)):
            return "its block heads score pairs of candidates differently"
        small.remove(0, known)
    return ""


def _pairs_agree(found: tuple[FloatArray, FloatArray], expected: tuple[FloatArray, FloatArray]) -> bool:
    """Compare candidates and scores, whose order is left to llama.cpp."""
    sorted_pairs = []
    for tokens, scores in ((found[0][0], found[1][0]), expected):
        orders = np.argsort(tokens, axis=1)
        before = [np.arange(tokens.shape[1]), *orders[:-1]]
        rows = [each[above][:, order] for each, above, order in zip(scores, before, orders, strict=True)]
        sorted_pairs.append((np.take_along_axis(tokens, orders, axis=1), np.array(rows)))
    (tokens, scores), (wanted, likely) = sorted_pairs
    return np.array_equal(tokens, wanted) and near(scores, likely)
