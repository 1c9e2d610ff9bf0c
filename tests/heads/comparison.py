"""Comparing a head with NumPy: a chain, and two branches that continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.heads.head_context import HeadContext
from edgespec.llama.runtime.batch import TokenBatch
from tests.heads.eagle_file import FloatArray
from tests.heads.reference import ReferenceLayer

_TOLERANCE = 2e-2  # of the largest value: keys and values are kept in half precision


def assert_same_tree(
    small: HeadContext,
    reference: ReferenceLayer,
    sequence: Sequence[int],
    children: Sequence[int],
    features: FloatArray,
    drafted: NDArray[np.int64] | None = None,
) -> None:
    """Compare a head's logits and features with what NumPy computes.

    Args:
        children: two tokens that may follow the text.
        features: (tokens of the sequence - 1, width). The last token belongs to the root, whose feature only
            children would need: they take the head's.
        drafted: the ids of the tokens that the head drafts; None for all.
    """
    drafted = np.arange(small.model.vocabulary.n_tokens) if drafted is None else drafted
    rows = list(sequence[1:])
    last = len(rows) - 1
    expected, outputs = reference.tree([*rows, *children], [*range(-1, last), last, last], features)
    small.decode(replace(TokenBatch.run(rows, 0, 2, "all"), features=features))
    first = small.logits()[:, drafted].copy(), small.features(len(rows))
    branches = TokenBatch(
        tokens=np.array(children, dtype=np.int32),
        positions=np.full(2, len(rows), dtype=np.int32),
        sequence_ids=np.arange(2, dtype=np.int32),
        offsets=np.arange(3, dtype=np.int64),
        wants_logits=np.ones(2, dtype=np.bool_),
        features=np.repeat(first[1][-1:], 2, axis=0),
    )
    small.decode(branches)
    second = small.logits()[:, drafted].copy(), small.features(2)
    others = np.delete(small.logits(), drafted, axis=1)
    assert not np.isfinite(others).any(), "tokens that it does not draft"
    at = len(rows)
    for found, wanted in ((first, (expected[:at], outputs[:at])), (second, (expected[at:], outputs[at:]))):
        assert all(near(*pair) for pair in zip(found, wanted, strict=True))


def near(found: FloatArray, expected: FloatArray) -> bool:
    """True if what was found is what was expected, up to rounding."""
    return bool(np.abs(found - expected).max() <= _TOLERANCE * np.abs(expected).max())
