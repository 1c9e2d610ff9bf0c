"""Block heads: what their headers say, and what follows from a block's logits for the nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError, PairingError
from edgespec.generation.config import GenerationConfig
from edgespec.heads.block import BlockHead, BlockKind, IndependentLogits, PairedLogits, read_block_head
from edgespec.heads.eagle import EagleHead
from edgespec.heads.families import head_of
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.ranking import CalibratedRanking
from tests.heads import files
from tests.heads.block_files import SHAPE, write_block_head
from tests.heads.block_reference import BlockShape
from tests.heads.eagle_file import FloatArray, write_head
from tests.heads.files import WIDTH, blank_target, without_tensor
from tests.heads.reference import random_weights
from tests.tiny_hybrid import N_VOCAB, add_bytes

DFLASH2 = replace(SHAPE, top_k=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return blank_target(tmp_path_factory.mktemp("target") / "large.gguf")


def written(path: Path, shape: BlockShape = SHAPE, **more: FloatArray) -> GGUFHeader:
    weights = {**shape.random(np.random.default_rng(1)), **more}
    return read_header(write_block_head(path, shape, weights, add_bytes))


def test_what_a_header_says(tmp_path: Path, target: ModelFiles) -> None:
    header = written(tmp_path / "head.gguf")
    head = head_of(ModelFiles((header,)))
    assert head_family(header) is HeadFamily.BLOCK
    assert head == BlockHead(
        header,
        (1, 2, 3),
        WIDTH,
        WIDTH,
        N_VOCAB,
        borrows_embedding=True,
        borrows_output=True,
        kind=BlockKind.DFLASH,
        block_size=6,
        causal=False,
        mask_token=SHAPE.mask,
    )
    head.require_fit(target)


def test_kinds_differ_by_their_tensors(tmp_path: Path) -> None:
    kinds = [
        (SHAPE, BlockKind.DFLASH, 5),
        (DFLASH2, BlockKind.DFLASH2, 5),
    ]
    for shape, kind, n_drafts in kinds:
        head = read_block_head(written(tmp_path / "head.gguf", shape))
        assert (head.kind, head.n_drafts) == (kind, n_drafts)
        assert head.candidates == shape.top_k
    plain = write_head(
        tmp_path / "plain.gguf",
        files.SHAPE,
        random_weights(files.SHAPE.tensors, np.random.default_rng(1)),
        add_bytes,
        drafted=np.arange(100),
    )
    assert type(head_of(ModelFiles.of(read_header(plain)))) is EagleHead


def _also(name: str) -> Callable[[GGUFHeader], GGUFHeader]:
    return lambda header: replace(header, tensors=(*header.tensors, replace(header.tensors[0], name=name)))


def _with(**values: Any) -> Callable[[GGUFHeader], GGUFHeader]:
    return lambda header: replace(header, metadata={**header.metadata, **values})


@pytest.mark.parametrize(
    ("shape", "change", "fault"),
    [
        (SHAPE, _with(**{"dflash.target_layers": 3}), "does not name the layers of its target that it reads"),
        (SHAPE, _with(**{"dflash.embedding_length": 32}), r"fc\.weight has the shape \[192, 64\] instead of"),
        (SHAPE, _with(**{"dflash.block_size": 1}), "it drafts blocks of 1 tokens; 2 to 64 are supported"),
        (SHAPE, _with(**{"dflash.block_size": 65}), "it drafts blocks of 65 tokens"),
        (SHAPE, _with(**{"tokenizer.ggml.mask_token_id": N_VOCAB}), "the token that masks the positions"),
        (SHAPE, _with(**{"tokenizer.ggml.mask_token_id": None}), "the token that masks the positions"),
        (SHAPE, without_tensor("fc.weight"), r"it has no tensor fc\.weight"),
        (DFLASH2, _with(**{"dflash.selector_top_k": 0}), "lacks its selector top k"),
        (DFLASH2, _with(**{"dflash.selector_top_k": 8}), "its sizes contradict each other"),
        (DFLASH2, _with(**{"dflash.conv_group_size": 24}), "its sizes contradict each other"),
    ],
)
def test_damaged_heads_are_refused(
    tmp_path: Path, shape: BlockShape, change: Callable[[GGUFHeader], GGUFHeader], fault: str
) -> None:
    header = change(written(tmp_path / "head.gguf", shape))
    with pytest.raises(ModelFileError, match=fault) as caught:
        read_block_head(header)
    assert caught.value.hint == "Get another conversion of the head."


def test_heads_of_other_targets_are_refused(tmp_path: Path, target: ModelFiles) -> None:
    deep = read_block_head(written(tmp_path / "deep.gguf", replace(SHAPE, layers=(1, 2, 4))))
    with pytest.raises(PairingError, match=r"it reads the layers 1, 2, 4 \(the first is 0\), but there"):
        deep.require_fit(target)
    narrow = read_block_head(written(tmp_path / "narrow.gguf", replace(SHAPE, width=32, head=8)))
    with pytest.raises(PairingError, match=r"it reads hidden states of 32 elements, not 64\."):
        narrow.require_fit(target)
    header = _also("markov_w1.weight")(deep.header)
    with pytest.raises(PairingError, match=r"is a DSpark head, and these are not supported\."):
        read_block_head(header)


def test_independent_positions_give_every_node_of_a_depth_the_same() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    block = IndependentLogits(logits)
    for depth in range(3):
        found = block.after(depth, np.array([4, 9], dtype=np.int32))
        np.testing.assert_array_equal(found, logits[[depth, depth]])


def test_pairs_give_each_candidate_its_own_scores() -> None:
    candidates = np.array([[3, 8], [5, 60]], dtype=np.float32)
    scores = np.array([[[1, 2], [1, 2]], [[3, 4], [5, 7]]], dtype=np.float32)
    block = PairedLogits(candidates, scores, 50)
    (root,) = block.after(0, np.array([9], dtype=np.int32))
    assert {int(i): float(root[i]) for i in np.flatnonzero(np.isfinite(root))} == {3: 1.0, 8: 2.0}
    rows = block.after(1, np.array([8, 3, 11], dtype=np.int32))
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in rows] == [[5]] * 3, "60 is padding"
    assert rows[:, 5].tolist() == [5, 3, 4], "others get the average"


def test_candidates_of_a_repeated_row_are_found_once_and_ranked_by_the_token_before() -> None:
    config = GenerationConfig(temperature=0.8, seed=3)
    logits = np.random.default_rng(5).standard_normal((1, 500)).astype(np.float32)
    after = np.array([4, 9, 4], dtype=np.int32)
    rankings = [CalibratedRanking(config, GumbelNoise(3, 500), DrafterCalibration()) for _ in range(2)]
    repeated = rankings[0].best(np.broadcast_to(logits[0], (3, 500)), [7, 7, 7], 5, after)
    one_by_one = rankings[1].best(np.repeat(logits, 3, axis=0), [7, 7, 7], 5, after)
    np.testing.assert_array_equal(repeated.tokens, one_by_one.tokens)
    np.testing.assert_array_equal(repeated.logprobs, one_by_one.logprobs)
