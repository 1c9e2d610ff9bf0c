"""The child's part of trying heads: a tiny one is run in the ways of drafting, and compared with NumPy.

Run by `processes.trial` for `support`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgeSpecError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.models.llama.heads.context import HeadContext
from edgespec.models.llama.heads.sample import N_VOCAB, SHAPE, WIDTH, add_bytes, write_head, write_target
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.heads.twin import FloatArray, HeadTwin
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model

_TEXT = (1, 40, 50, 60, 70, 80)
_TOLERANCE = 2e-2  # of the largest value: keys and values are kept in half precision

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Try what drafting with heads expects of the build.

    Returns:
        What is wrong as "error", or nothing.
    """
    del request
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"error": wrong} if (wrong := _compare(Path(folder))) else {}
        except UnsupportedBuild as error:
            return {"error": str(error)}
        except EdgeSpecError as error:
            return {"error": f"it refuses a head ({error.what})"}


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
        small = HeadContext(head, large, n_cells=256, n_sequences=4, n_threads=1)
        large.decode(Batch.run(_TEXT, 0, 1, "last"))
        hidden = tap.rows()
        return _differences(small, HeadTwin(SHAPE, weights, embedding), hidden, drafted)


def _differences(small: HeadContext, twin: HeadTwin, hidden: FloatArray, drafted: Any) -> str:
    features = small.encode(hidden)
    if not _near(features, twin.encode(hidden)):
        return "its encoder of heads computes something else than is expected"
    # The last hidden state belongs to the root, whose feature only children would need: they take the head's.
    known, text = features[:-1], list(_TEXT[1:])
    children = [int(drafted[3]), int(drafted[7])]
    last = len(text) - 1
    expected, outputs = twin.tree([*text, *children], [*range(-1, last), last, last], known)
    chain = Batch.run(text, 0, 2, "all")
    small.decode(_with_features(chain, known))
    first = small.logits()[:, drafted].copy(), small.features(len(text))
    branches = Batch(
        tokens=np.array(children, dtype=np.int32),
        positions=np.full(2, len(text), dtype=np.int32),
        sequence_ids=np.arange(2, dtype=np.int32),
        offsets=np.arange(3, dtype=np.int64),
        wants_logits=np.ones(2, dtype=np.bool_),
    )
    small.decode(_with_features(branches, np.repeat(first[1][-1:], 2, axis=0)))
    second = small.logits()[:, drafted].copy(), small.features(2)
    if np.isfinite(np.delete(small.logits(), drafted, axis=1)).any():
        return "its heads draft tokens that they do not have"
    for found, wanted in zip((first, second), _split(expected, outputs, len(text)), strict=True):
        if not all(_near(*pair) for pair in zip(found, wanted, strict=True)):
            return "its decoder of heads computes something else than is expected"
    return ""


def _with_features(batch: Batch, features: FloatArray) -> Batch:
    return replace(batch, features=features)


def _split(logits: FloatArray, features: FloatArray, at: int) -> list[tuple[FloatArray, FloatArray]]:
    return [(logits[:at], features[:at]), (logits[at:], features[at:])]


def _near(found: FloatArray, expected: FloatArray) -> bool:
    return bool(np.abs(found - expected).max() <= _TOLERANCE * np.abs(expected).max())
