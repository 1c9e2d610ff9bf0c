"""Headers of draft heads: read right, and refused where llama.cpp would not survive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ModelFileError, PairingError
from edgespec.heads.eagle import EagleHead, read_eagle_head
from edgespec.heads.head import drafted_tokens
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.runtime import nextn
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader
from tests.heads.eagle_file import FloatArray, HeadShape, write_head
from tests.heads.files import SHAPE, WIDTH, blank_target, without_tensor
from tests.heads.reference import ReferenceHead, random_weights
from tests.tiny_hybrid import N_VOCAB, add_bytes

DRAFTED = np.arange(0, 2 * SHAPE.n_drafted, 2, dtype=np.int64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return blank_target(tmp_path_factory.mktemp("target") / "large.gguf")


def written(path: Path, drafted: Any = DRAFTED, shape: HeadShape = SHAPE, **more: FloatArray) -> GGUFHeader:
    weights = {**random_weights(shape.tensors, np.random.default_rng(1)), **more}
    return read_header(write_head(path, shape, weights, add_bytes, drafted=drafted))


def test_what_a_header_says(tmp_path: Path, target: ModelFiles) -> None:
    header = written(tmp_path / "head.gguf")
    head = read_eagle_head(header)
    assert head_family(header) is HeadFamily.EAGLE
    assert head_family(target.headers[0]) is None
    assert head == EagleHead(
        header, (1, 2, 3), WIDTH, WIDTH, 100, borrows_embedding=True, borrows_output=False
    )
    assert drafted_tokens(head).tolist() == DRAFTED.tolist()
    head.require_fit(target)
    embedding = np.zeros((N_VOCAB, 32), dtype=np.float32)
    own = written(
        tmp_path / "own.gguf",
        shape=replace(SHAPE, width=32, head=8),
        **{"token_embd.weight": embedding},
    )
    assert not read_eagle_head(own).borrows_embedding
    read_eagle_head(own).require_fit(target)


@pytest.mark.parametrize(
    ("drafted", "fault"),
    [
        (DRAFTED - 1, "does not hold distinct token ids"),
        (DRAFTED + 100, "does not hold distinct token ids"),
        (np.zeros(100, dtype=np.int64), "in some files it holds offsets"),
    ],
    ids=["negative", "too large", "offsets"],
)
def test_tables_of_other_ids_are_refused(
    tmp_path: Path, target: ModelFiles, drafted: Any, fault: str
) -> None:
    head = read_eagle_head(written(tmp_path / "head.gguf", drafted))
    with pytest.raises(ModelFileError, match=fault):
        head.require_fit(target)


def _with(**values: Any) -> Callable[[GGUFHeader], GGUFHeader]:
    changed = {f"eagle3.{key}": value for key, value in values.items()}
    return lambda header: replace(header, metadata={**header.metadata, **changed})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_with(target_layers=ArrayInfo("int32", 3)), "does not name the layers of its target that it reads"),
        (_with(target_layers=3), "does not name the layers"),
        (_with(target_hidden_size=0), "lacks its target hidden size"),
        (_with(block_count=2), "more than one layer"),
        (
            _with(target_hidden_size=32),
            r"its tensor fc\.weight has the shape \[192, 64\] instead of \[96, 64\]",
        ),
        (without_tensor("fc.weight"), r"it has no tensor fc\.weight"),
        (without_tensor("output.weight"), r"\(d2t\) is invalid"),
        (
            without_tensor("d2t"),
            r"its tensor output\.weight has the shape \[64, 100\] instead of \[64, 259\]",
        ),
    ],
)
def test_damaged_heads_are_refused(
    tmp_path: Path, change: Callable[[GGUFHeader], GGUFHeader], fault: str
) -> None:
    header = change(written(tmp_path / "head.gguf"))
    with pytest.raises(ModelFileError, match=fault) as caught:
        read_eagle_head(header)
    assert caught.value.hint == "Get another conversion of the head."


def test_targets_with_more_tokens_are_refused(tmp_path: Path, target: ModelFiles) -> None:
    head = read_eagle_head(written(tmp_path / "head.gguf"))
    tokens = {"tokenizer.ggml.tokens": ArrayInfo("string", N_VOCAB + 1)}
    header = replace(target.headers[0], metadata={**target.headers[0].metadata, **tokens})
    with pytest.raises(PairingError, match=r"it knows 259 tokens, but the target has 260\.") as caught:
        head.require_fit(ModelFiles((header,)))
    assert caught.value.hint.startswith("Name a head that was trained for this model")


def test_functions_that_a_build_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nextn._NAMES, "lost", ("llama_lost", "_Zlost"))  # type: ignore[call-overload]
    with pytest.raises(UnsupportedBuild, match="it has no llama_lost"):
        nextn._function("lost", None, ())


@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_a_path_of_a_tree_computes_what_it_computes_alone(seed: int, n_rows: int) -> None:
    """In NumPy's head, siblings do not see each other."""
    rng = np.random.default_rng(seed)
    embedding = rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
    reference = ReferenceHead(SHAPE, random_weights(SHAPE.tensors, rng), embedding)
    tokens = rng.integers(0, N_VOCAB, n_rows).tolist()
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, n_rows))]
    features = rng.standard_normal((1, WIDTH)).astype(np.float32)
    logits, _ = reference.tree(tokens, parents, features)
    path = [n_rows - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    alone, _ = reference.tree([tokens[row] for row in path], range(-1, len(path) - 1), features)
    np.testing.assert_allclose(alone, logits[path], rtol=1e-4, atol=1e-4)
