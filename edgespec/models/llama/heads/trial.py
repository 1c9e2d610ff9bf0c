"""The child's part of trying heads: a tiny one is run in the ways of drafting, and compared with NumPy.

Run by `processes.trial` for `support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.models.llama.heads.comparison import near, outcome, tree_fault
from edgespec.models.llama.heads.context import EagleContext
from edgespec.models.llama.heads.reference import ReferenceHead
from edgespec.models.llama.heads.sample import N_VOCAB, SHAPE, WIDTH, add_bytes, write_head, write_target
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model

_TEXT = (1, 40, 50, 60, 70, 80)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Try what drafting with heads expects of the build.

    Returns:
        What is wrong as "error", or nothing.
    """
    del request
    return outcome(_compare, "a head")


def _compare(folder: Path) -> str:
    """Describe the differences between the build and NumPy; empty if there are none."""
    rng = np.random.default_rng(1)
    embedding = rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
    weights = SHAPE.random(rng)
    drafted = np.sort(rng.permutation(N_VOCAB)[: SHAPE.n_drafted]).astype(np.int64)
    paths = folder / "target.gguf", folder / "head.gguf"
    write_target(paths[0], embedding, rng)
    write_head(paths[1], SHAPE, weights, add_bytes, drafted=drafted)
    tap = LayerTap(SHAPE.layers, WIDTH)
    with (  # made here, and this is a child process
        Model(paths[0], repack=False, vetted=False) as target,
        Model(paths[1], repack=False, vetted=False) as head,
    ):
        large = Context(
            target, n_cells=256, n_rows=64, n_outputs=64, n_sequences=4, n_threads=1, observers=[tap]
        )
        small = EagleContext(head, large, n_cells=256, n_sequences=4, n_threads=1)
        large.decode(TokenBatch.run(_TEXT, 0, 1, "last"))
        hidden = tap.rows()
        reference = ReferenceHead(SHAPE, weights, embedding)
        features = small.encode(hidden)
        if not near(features, reference.encode(hidden)):
            return "its encoder of heads computes unexpected values"
        children = [int(drafted[3]), int(drafted[7])]
        return tree_fault(small, reference, _TEXT, children, features[:-1], drafted)
