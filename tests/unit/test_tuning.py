"""Parts of tuning: prompts, files of blocks, batches, the loss, and which models can be tuned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.agreement import SampleAnswer
from edgespec.drafting.tuning.answers import (
    OWN,
    Prompt,
    TargetAnswer,
    bundled_prompts,
    read_prompts,
    with_own,
)
from edgespec.drafting.tuning.network.shape import TrainedExtent, shape_of
from edgespec.drafting.tuning.training import (
    answers_of_step,
    batch_of,
    divergence,
    tokens_seen,
)
from edgespec.errors import BackendError, UsageError
from edgespec.files.blocks import BlockFile
from edgespec.models.hub.registry import MADE, REGISTERED, DrafterPair, PairRegistry

VOCAB = 12


def test_every_category_is_asked_and_held_out() -> None:
    prompts = bundled_prompts()
    asked, kept = (Counter(p.category for p in part) for part in (prompts.training, prompts.held_out))
    assert asked.keys() == kept.keys()
    assert len(set(asked.values())) == len(set(kept.values())) == 1
    categories = len(asked)
    assert len({prompt.category for prompt in prompts.training[:categories]}) == categories
    assert len(set(prompts.training)) == len(prompts.training)
    texts = [prompt.text for prompt in prompts.training]
    assert not any(prompt.text in texts for prompt in prompts.held_out)


def test_own_prompts_come_first_and_some_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "own"
    lines = [f"Question {number}" for number in range(15)]
    path.write_text(
        "\n".join(
            [
                *lines,
                "",
                '{"prompt": "In JSON", "category": "odd"}',
                "{a set}",
                lines[0],
                '{"prompt": "{a set}", "category": "odd"}',
            ]
        )
    )
    own = read_prompts(path)
    assert [prompt.text for prompt in own] == [*lines, "In JSON", "{a set}"]
    assert [prompt.category for prompt in own[-2:]] == ["odd", OWN]
    prompts = with_own(bundled_prompts(), own)
    assert [prompt.text for prompt in prompts.held_out[:2]] == ["Question 7", "In JSON"]
    assert set(prompts.training[:15]) | set(prompts.held_out[:2]) == set(own)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "contains no prompts"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b'One\n{"question": "x"}', 'Line 2 of .* has no "prompt"'),
    ],
)
def test_files_that_hold_no_prompts(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_prompts(path)


@settings(max_examples=30, deadline=None)
@given(blocks=st.lists(st.binary(max_size=20), max_size=4), data=st.data())
def test_blocks_before_a_torn_write_are_kept(
    blocks: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "file"
    file = BlockFile(path, b"label")
    ends = [path.stat().st_size]
    for block in blocks:
        file.append(block)
        ends.append(path.stat().st_size)
    cut = data.draw(st.integers(ends[0], ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = blocks[: sum(end <= cut for end in ends) - 1]
    again = BlockFile(path, b"label")
    assert list(again.blocks()) == whole
    again.append(b"new")
    assert list(BlockFile(path, b"label").blocks()) == [*whole, b"new"]


def test_damaged_blocks_and_other_labels(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = BlockFile(path, b"label")
    file.append(b"first")
    before = path.stat().st_size
    file.append(b"second")
    content = bytearray(path.read_bytes())
    content[before + 9] ^= 1
    path.write_bytes(content)
    assert list(BlockFile(path, b"label").blocks()) == [b"first"]
    assert list(BlockFile(path, b"other").blocks()) == []
    assert list(BlockFile(path, b"label").blocks()) == []  # it was begun anew


logit = st.floats(-8, 8, width=32)
rows = st.lists(st.lists(logit, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3)


@given(drafter=rows, target=rows, k=st.integers(1, VOCAB))
def test_divergence(drafter: list[list[float]], target: list[list[float]], k: int) -> None:
    count = min(len(drafter), len(target))
    q, p = (torch.tensor(part[:count]).log_softmax(-1) for part in (drafter, target))
    logprobs, top = p.topk(k)
    found = float(divergence(torch.tensor(drafter[:count]), top, logprobs))
    whole = float((p.exp() * (p - q)).sum(-1).mean())
    assert -1e-4 < found <= whole + 1e-3  # merging tokens loses what tells them apart (data processing)
    if k >= VOCAB - 1:
        assert found == pytest.approx(whole, abs=1e-3)
    assert float(divergence(p, top, logprobs)) == pytest.approx(0, abs=1e-4)


def test_divergence_falls_along_its_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(4, VOCAB, generator=generator).log_softmax(-1)
    logprobs, top = target.topk(5)
    logits = torch.randn(4, VOCAB, generator=generator, requires_grad=True)
    before = divergence(logits, top, logprobs)
    (gradient,) = torch.autograd.grad(before, logits)
    assert divergence(logits - 0.1 * gradient, top, logprobs) < before


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("token_embd.weight", False),
        ("output.weight", False),
        ("output_norm.weight", True),
        ("blk.1.attn_q.weight", False),
        ("blk.2.attn_q.weight", True),
        ("blk.2.attn_q.bias", True),
        ("blk.11.attn_norm.weight", True),
    ],
)
def test_what_is_trained(name: str, trained: bool) -> None:
    assert TrainedExtent(2).trains(name) is trained


def answer(prompt: int, said: int, *, ended: bool = True, k: int = 3) -> TargetAnswer:
    count = said + ended
    top = np.arange(count * k, dtype=np.int32).reshape(count, k)
    return TargetAnswer(
        Prompt(f"{prompt} {said}", OWN),
        SampleAnswer(tuple(range(prompt)), tuple(range(100, 100 + said))),
        top,
        np.full((count, k), -2, np.float16),
    )


def test_rows_of_a_batch_are_those_that_chose_the_answer() -> None:
    batch = batch_of([answer(3, 2), answer(1, 5, ended=False), answer(509, 8)])
    assert batch.lengths == (5, 6, 512)
    assert batch.tokens.shape == (5 + 6 + 512,)
    assert batch.tokens[:6].tolist() == [0, 1, 2, 100, 101, 0]
    first, second, third = [2, 3, 4], [0, 1, 2, 3, 4], [508, 509, 510, 511]  # what is cut off has no row
    assert batch.rows.tolist() == [*first, *(5 + row for row in second), *(11 + row for row in third)]
    assert len(batch.top) == len(batch.logprobs) == 12
    assert batch.top[3].tolist() == [0, 1, 2]


def test_tokens_that_the_output_layer_is_computed_for() -> None:
    assert tokens_seen([answer(3, 2), answer(1, 5, k=1)]).tolist() == list(range(9))


@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 5))
def test_every_answer_comes_once_a_turn(count: int, size: int, seed: int) -> None:
    steps = max(count // size, 1)
    for turn in range(2):
        seen = [
            one
            for step in range(turn * steps, (turn + 1) * steps)
            for one in answers_of_step(count, step, size, seed)
        ]
        assert len(seen) == len(set(seen)) == min(steps * size, count)


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}
TENSORS = ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight")


def test_the_shape_of_a_llama() -> None:
    shape = shape_of(
        LLAMA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, TENSORS, "m"
    )
    assert (shape.head, shape.heads, shape.kv_heads, shape.rotated) == (16, 4, 2, 16)
    assert (shape.rope_scale, shape.attention_scale, shape.embedding_scale) == (0.25, 0.25, 1)
    assert not shape.is_local(0)


@pytest.mark.parametrize(
    ("changed", "more", "why"),
    [
        ({"general.architecture": "gemma2"}, (), "its architecture is 'gemma2'"),
        ({"llama.expert_count": 8}, (), "it has a setting expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, (), "its positions are scaled by yarn"),
        (
            {"llama.attention.head_count_kv": "an array"},
            (),
            "its attention.head_count_kv differs between layers",
        ),
        ({"llama.attention.value_length": 8}, (), "its keys and values have different lengths"),
        ({}, ("blk.0.attn_sinks.weight",), "it has the tensor 'blk.0.attn_sinks.weight'"),
        ({}, ("rope_factors_long.weight",), "it has the tensor 'rope_factors_long.weight'"),
    ],
)
def test_models_that_are_not_tuned(changed: dict[str, Any], more: tuple[str, ...], why: str) -> None:
    with pytest.raises(BackendError) as caught:
        shape_of(LLAMA | changed, (*TENSORS, *more), "m.gguf")
    assert caught.value.what.startswith(f"m.gguf cannot be tuned: {why}")
    assert "Mistral" in caught.value.hint


def test_the_preferred_pair_comes_first_until_a_person_says_otherwise(tmp_path: Path) -> None:
    registry = PairRegistry(tmp_path / "pairs.json")
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.touch()
    agreeing, tuned, retuned, own = (str(path) for path in paths)
    registry.add(DrafterPair("t", "t", agreeing, MADE, top1=0.9))
    registry.add(DrafterPair("u", "u", agreeing, MADE, top1=0.2, preferred=True))
    for drafter in (tuned, retuned):
        registry.add(DrafterPair("t", "t", drafter, MADE, top1=0.5, preferred=True))
        assert registry.pairs("t")[0].drafter == drafter
    assert [pair.preferred for pair in registry.pairs("t")] == [True, False, False]
    registry.add(DrafterPair("t", "t", retuned, MADE, top1=0.6))
    assert [(pair.preferred, pair.top1) for pair in registry.pairs("t")][:2] == [(True, 0.6), (False, 0.9)]
    registry.add(DrafterPair("t", "t", own, REGISTERED, top1=0.1))
    assert not any(pair.preferred for pair in registry.pairs("t"))
    assert registry.pairs("u")[0].preferred
