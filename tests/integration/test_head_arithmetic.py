"""What llama.cpp computes of draft heads of each family, beside NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.heads.assistant import AssistantContext
from edgespec.heads.block import BlockContext
from edgespec.heads.eagle import EagleContext
from edgespec.heads.head_context import HeadContext
from edgespec.heads.hidden_states import LastStates, LayerTap
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model
from tests.heads import block_files
from tests.heads.block_files import write_block_head
from tests.heads.block_reference import BlockShape, ReferenceBlockHead
from tests.heads.comparison import assert_same_tree, near
from tests.heads.eagle_file import FloatArray, write_head
from tests.heads.files import MTP_SHAPE, SHAPE, WIDTH, write_target
from tests.heads.gemma_files import write_gemma
from tests.heads.gemma_reference import AssistantReference, GemmaReference, GemmaShape
from tests.heads.reference import ReferenceHead, ReferenceMTPLayer, random_weights
from tests.tiny_hybrid import N_VOCAB, add_bytes, write_tiny_hybrid

TEXT = (1, 40, 50, 60, 70, 80)
CHILDREN = (90, 100)
BLOCKS = {
    "DFlash": block_files.SHAPE,
    "causal": replace(block_files.SHAPE, causal=True),
    "DFlash2": replace(block_files.SHAPE, top_k=4),
}
# Two layers of each kind, so that keys of another layer would show; and texts that are longer than a window.
GEMMA = GemmaShape(
    width=64,
    hidden=96,
    heads=4,
    heads_kv=2,
    head=32,
    sliding_head=16,
    sliding=(True, False, True, False),
    window=5,
    n_vocab=N_VOCAB,
)
ASSISTANT = GemmaShape(
    width=48,
    hidden=80,
    heads=4,
    heads_kv=2,
    head=32,
    sliding_head=16,
    sliding=(True, True, False),
    window=5,
    n_vocab=N_VOCAB,
    target_width=64,
)
TEXTS = ((1, 40, 50, 60, 70, 80, 90, 41, 51, 61), (1, 42, 52, 62, 72, 82, 92, 43))
ROOTS = (71, 73)


def context_of(model: Model, *observers: GraphObserver, n_sequences: int = 4) -> Context:
    return Context(
        model,
        n_cells=256,
        n_rows=64,
        n_outputs=64,
        n_sequences=n_sequences,
        n_threads=1,
        observers=observers,
    )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture
def embedding(rng: np.random.Generator) -> FloatArray:
    return rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)


def test_an_eagle_head(rng: np.random.Generator, embedding: FloatArray, tmp_path: Path) -> None:
    weights = random_weights(SHAPE.tensors, rng)
    drafted = np.sort(rng.permutation(N_VOCAB)[: SHAPE.n_drafted]).astype(np.int64)
    target_path = write_target(tmp_path / "target.gguf", embedding, rng)
    head_path = write_head(tmp_path / "head.gguf", SHAPE, weights, add_bytes, drafted=drafted)
    tap = LayerTap(SHAPE.layers, WIDTH)
    with Model(target_path, repack=False) as target, Model(head_path, repack=False) as head:
        large = context_of(target, tap)
        small = EagleContext(head, large, n_cells=256, n_sequences=4, n_threads=1)
        large.decode(TokenBatch.run(TEXT, 0, 1, "last"))
        reference = ReferenceHead(SHAPE, weights, embedding)
        features = small.encode(tap.rows())
        assert near(features, reference.encode(tap.rows()))
        children = [int(drafted[3]), int(drafted[7])]
        assert_same_tree(small, reference, TEXT, children, features[:-1], drafted)


@pytest.mark.parametrize("shape", BLOCKS.values(), ids=BLOCKS)
def test_a_block_head(
    shape: BlockShape, rng: np.random.Generator, embedding: FloatArray, tmp_path: Path
) -> None:
    """Two blocks after one another, the second behind more text."""
    weights = shape.random(rng)
    target_path = write_target(tmp_path / "target.gguf", embedding, rng)
    head_path = write_block_head(tmp_path / "head.gguf", shape, weights, add_bytes)
    tap = LayerTap(shape.layers, WIDTH)
    reference = ReferenceBlockHead(shape, weights, embedding, embedding)
    with Model(target_path, repack=False) as target, Model(head_path, repack=False) as head:
        large = context_of(target, tap)
        large.decode(TokenBatch.run(TEXT, 0, 1, "last"))
        hidden = tap.rows()
        small = BlockContext(head, large, n_cells=256, n_sequences=4, n_threads=1)
        read = 0
        for known in (3, 5):
            small.decode(small.sequence_batch(hidden[read:known], read))
            read = known
            block = small.block_batch(TEXT[known], known)
            small.decode(block)
            tokens = block.tokens.tolist()
            assert near(small.logits(), reference.block(hidden[:known], tokens))
            if shape.top_k:
                assert_same_pairs(small.pairs(1), reference.pairs(hidden[:known], tokens))
            small.remove(0, known)


def assert_same_pairs(found: tuple[FloatArray, FloatArray], expected: tuple[FloatArray, FloatArray]) -> None:
    """Compare candidates and scores, whose order is left to llama.cpp."""
    sorted_pairs = []
    for tokens, scores in ((found[0][0], found[1][0]), expected):
        orders = np.argsort(tokens, axis=1)
        before = [np.arange(tokens.shape[1]), *orders[:-1]]
        rows = [each[above][:, order] for each, above, order in zip(scores, before, orders, strict=True)]
        sorted_pairs.append((np.take_along_axis(tokens, orders, axis=1), np.array(rows)))
    (tokens, scores), (wanted, likely) = sorted_pairs
    assert np.array_equal(tokens, wanted)
    assert near(scores, likely)


def test_a_layer_for_further_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    weights = random_weights(MTP_SHAPE.tensors, np.random.default_rng(2))
    write_tiny_hybrid(path, gguf.GGMLQuantizationType.F32, lambda values: None, weights)
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    embedding, output = (np.array(written[f"{name}.weight"]) for name in ("token_embd", "output"))
    with Model(path, repack=False, mtp=True) as model:
        plain, shown = context_of(model, n_sequences=1), context_of(model, n_sequences=1)
        states = LastStates(MTP_SHAPE.width)
        states.attach(shown)
        logits = []
        for context in (plain, shown):
            context.decode(TokenBatch.run(TEXT, 0, 1, "all"))
            logits.append(context.logits().copy())
        hidden: FloatArray = states.rows().copy()
        assert np.array_equal(*logits), "showing its last states changes nothing"
        assert np.abs(hidden @ output.T - logits[0]).max() <= 1e-2 * np.abs(logits[0]).max()
        small = HeadContext(model, n_cells=256, n_sequences=4, n_threads=1)
        reference = ReferenceMTPLayer(MTP_SHAPE, weights, embedding, output)
        assert_same_tree(small, reference, TEXT, CHILDREN, hidden[:-1])


def test_an_assistant(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    large, small = GEMMA.random(rng), ASSISTANT.random(rng)
    paths = [
        write_gemma(tmp_path / f"{shape.width}.gguf", shape, weights, add_bytes)
        for shape, weights in ((GEMMA, large), (ASSISTANT, small))
    ]
    reference = GemmaReference(GEMMA, large)
    drafts = AssistantReference(ASSISTANT, small, large["token_embd.weight"])
    with Model(paths[0], repack=False) as target, Model(paths[1], repack=False) as assistant:
        context = context_of(target, n_sequences=8)
        states = LastStates(GEMMA.width)
        states.attach(context)
        beside = AssistantContext(assistant, context, n_cells=0, n_sequences=8, n_threads=1)
        first = BranchingCache(SharedCells(context, ordered=True))
        caches = [first, first.another()]
        for cache, text in zip(caches, TEXTS, strict=True):
            # Rows that are rejected leave cells behind them, which nobody may see.
            cache.append(TokenBatch.run(text[:-3], 0, cache.open_paths, "all"), 8)
            cache.try_branches(TokenBatch.run((5, 6), cache.length, 1, "all"), 8)
            cache.commit(0, 0, used_paths=1, n_rows=2)
            cache.append(TokenBatch.run(text[-3:], cache.length, cache.open_paths, "all"), 8)
            assert near(states.rows()[:3], reference.read(text).states[-3:])
        features = np.stack([reference.read(text).states[-1] for text in TEXTS])
        before = [bytes(cache.save(0, cache.length)) for cache in caches]
        for _ in range(2):  # what was drafted leaves nothing behind
            assert_same_drafts(beside, caches, drafts, reference, features)
        after = [bytes(cache.save(0, cache.length)) for cache in caches]
        assert before == after, "it writes nothing to its target's cells"


def assert_same_drafts(
    beside: AssistantContext,
    caches: Sequence[BranchingCache],
    drafts: AssistantReference,
    reference: GemmaReference,
    features: FloatArray,
) -> None:
    """Draft for two texts at once: the root of each, and then two tokens that may follow it.

    Args:
        features: (texts, width) of the texts' last tokens.
    """
    ids = [cache.ids[0] for cache in caches]
    logits, own = beside.draft(ROOTS, [len(text) for text in TEXTS], ids, features)
    roots = logits.copy(), own
    twice = np.repeat(np.arange(len(TEXTS)), 2)
    below = beside.draft(
        [*CHILDREN, *CHILDREN[::-1]],
        [len(TEXTS[at]) for at in twice],
        [ids[at] for at in twice],
        roots[1][twice],
    )
    for at, text in enumerate(TEXTS):
        read = reference.read(text)
        root = drafts.draft(read, [ROOTS[at]], features[at : at + 1])
        children = CHILDREN if at == 0 else CHILDREN[::-1]
        expected = drafts.draft(read, children, np.repeat(root[1], 2, axis=0))
        for found, wanted in (
            *((part[at : at + 1], other) for part, other in zip(roots, root, strict=True)),
            *((part[2 * at : 2 * at + 2], other) for part, other in zip(below, expected, strict=True)),
        ):
            assert near(found, wanted)
