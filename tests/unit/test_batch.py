"""The rows of a decode call, read back through the C struct that llama.cpp is given."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.llama.runtime.batch import EncoderBatch, TokenBatch, tree_batch
from edgespec.speculation.tree import TokenTree
from tests.unit.strategies import trees

Row = tuple[int, int, list[int], bool]


def _rows(batch: TokenBatch) -> list[Row]:
    """(token, position, sequence ids, wants logits) of each row, from the arrays."""
    return [
        (
            int(batch.tokens[i]),
            int(batch.positions[i]),
            batch.sequence_ids[batch.offsets[i] : batch.offsets[i + 1]].tolist(),
            bool(batch.wants_logits[i]),
        )
        for i in range(len(batch))
    ]


def _c_rows(struct: Any) -> list[Row]:
    """The lines as llama.cpp reads them."""
    return [
        (
            struct.token[i],
            struct.pos[i],
            [struct.seq_id[i][k] for k in range(struct.n_seq_id[i])],
            bool(struct.logits[i]),
        )
        for i in range(struct.n_tokens)
    ]


@given(trees(120), st.integers(0, 2**20))
def test_the_c_struct_holds_the_rows_of_a_tree(tree: TokenTree, start: int) -> None:
    batch = tree_batch(tree, start)
    struct, kept = batch.to_llama()
    assert _c_rows(struct) == _rows(batch)
    assert not struct.embd
    del kept


def test_the_arrays_outlive_the_batch() -> None:
    struct, kept = TokenBatch.run([4, 5, 6], start=10, n_sequences=2, logits="last").padded(5, 7).to_llama()
    gc.collect()
    assert _c_rows(struct) == [
        (4, 10, [0, 1], False),
        (5, 11, [0, 1], False),
        (6, 12, [0, 1], True),
        (4, 0, [7], True),
        (4, 1, [7], True),
    ]
    assert len(kept) == 6


def test_features_go_with_their_rows() -> None:
    features = np.arange(6, dtype=np.float64).reshape(3, 2)
    batches = [
        replace(TokenBatch.run([4, 5, 6], 0, 1), features=features),
        replace(TokenBatch.run([7], 3, 1), features=features[:1]),
    ]
    joined = TokenBatch.joined(batches)
    assert joined.features is not None
    assert joined.features.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    struct, kept = joined.to_llama()
    floats = (ctypes.c_float * 8).from_address(ctypes.cast(struct.embd, ctypes.c_void_p).value or 0)
    assert list(floats) == [0, 1, 2, 3, 4, 5, 0, 1]
    assert struct.token
    assert len(kept) == 7
    encoded = EncoderBatch.of(features.astype(np.float32), 9)
    struct, kept = encoded.to_llama()
    assert (len(encoded), struct.n_tokens, bool(struct.token)) == (3, 3, False)
    assert [struct.seq_id[row][0] for row in range(3)] == [9, 9, 9]
    assert [struct.pos[row] for row in range(3)] == [0, 1, 2]


def test_arrays_of_other_types_and_strides_are_converted() -> None:
    batch = TokenBatch(
        tokens=np.arange(6, dtype=np.int64)[::2],
        positions=np.arange(6, dtype=np.int32)[::-2],
        sequence_ids=np.array([3, 0, 2, 0, 1, 0, 0, 0], dtype=np.int32)[::2],
        offsets=np.array([0, 2, 3, 4], dtype=np.int64),
        wants_logits=np.array([True, False, True]),
    )
    struct, _kept = batch.to_llama()
    assert _c_rows(struct) == [(0, 5, [3, 2], True), (2, 3, [1], False), (4, 1, [0], True)]


@pytest.mark.parametrize(
    ("logits", "wanted"), [("none", [False] * 3), ("last", [False, False, True]), ("all", [True] * 3)]
)
def test_a_run_is_consecutive_and_in_the_first_sequences(logits: str, wanted: list[bool]) -> None:
    batch = TokenBatch.run([9, 8, 7], start=4, n_sequences=3, logits=logits)
    assert _rows(batch) == [(token, 4 + i, [0, 1, 2], wanted[i]) for i, token in enumerate([9, 8, 7])]


@given(trees(40), st.integers(0, 60), st.integers(0, 300))
def test_padding_adds_rows_nobody_reads(tree: TokenTree, rows: int, sequence_id: int) -> None:
    batch = tree_batch(tree, 100)
    padded = batch.padded(rows, sequence_id)
    assert len(padded) == max(rows, len(batch))
    assert _rows(padded)[: len(batch)] == _rows(batch)
    assert _rows(padded)[len(batch) :] == [
        (int(batch.tokens[0]), i, [sequence_id], True) for i in range(max(rows - len(batch), 0))
    ]
    assert padded.n_outputs == batch.n_outputs == len(batch)
    if rows <= len(batch):
        assert padded is batch
