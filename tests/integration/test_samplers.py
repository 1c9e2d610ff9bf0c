"""DRY, XTC and top-n-sigma compared with llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.repetition import RepetitionPenalty
from edgespec.speculation.sampling import Sampler
from edgespec.speculation.spelling import Spelling

TEXT = (
    'The fox said: "Go on, go on." Then the fox said: "Go home."\n\nAnd the crow said: "Go on, go on." * So'
)


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, draft="none", context=256) as engine:
        yield engine


def applied(samplers: Sequence[Any], logits: np.ndarray, before: Sequence[int] = ()) -> dict[int, float]:
    """The logits of the tokens that llama.cpp's samplers leave, which are freed."""
    data = (llama_cpp.llama_token_data * len(logits))()
    for token, logit in enumerate(logits.tolist()):
        data[token] = llama_cpp.llama_token_data(token, logit, 0)
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    for sampler in samplers:
        for token in before:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    left = (array.data[place] for place in range(array.size))
    return {entry.id: entry.logit for entry in left if entry.logit > -np.inf}


@pytest.mark.parametrize("breakers", [("\n", ":", '"', "*"), (), ("fox",), (" said:",)])
@pytest.mark.parametrize("window", [-1, 20])
def test_dry_penalizes_as_llama_cpp_does(engine: Engine, breakers: tuple[str, ...], window: int) -> None:
    vocabulary = engine.target.model.vocabulary
    said = vocabulary.tokenize(TEXT, control=False)
    choice, logits = random.Random(1), np.zeros(vocabulary.n_tokens)
    penalties = 0
    for case in range(8):
        text = [*said[: choice.randint(3, 60)], *said[: choice.randint(1, 60)]]
        if case % 2:
            text = choice.choices(said[: choice.choice([3, 8, 40])], k=choice.randint(1, 120))
        config = GenerationConfig(
            dry_multiplier=0.8,
            dry_allowed_length=case % 3 + 1,
            dry_penalty_last_n=window,
            dry_sequence_breakers=breakers,
        )
        marks = (ctypes.c_char_p * max(len(breakers), 1))(*(mark.encode() for mark in breakers))
        theirs = llama_cpp.llama_sampler_init_dry(
            vocabulary._handle, 0.8, 1.75, case % 3 + 1, 4096 if window < 0 else window, marks, len(breakers)
        )
        expected = {token: -logit for token, logit in applied([theirs], logits, text).items() if logit}
        tokens, found = RepetitionPenalty(config, Spelling(vocabulary)).penalties(text)
        assert dict(zip(tokens.tolist(), found.tolist(), strict=True)) == pytest.approx(expected, rel=1e-4)
        penalties += len(expected)
    assert penalties


@pytest.mark.parametrize("sigmas", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
def test_filters_leave_the_tokens_that_llama_cpp_leaves(
    sigmas: float, min_p: float, threshold: float
) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, rng.choice([1, 3, 6]), rng.integers(2, 300)).astype(np.float32)
        theirs = [llama_cpp.llama_sampler_init_top_n_sigma(sigmas)] if sigmas else []
        theirs += [llama_cpp.llama_sampler_init_min_p(min_p, 1)] if min_p else []
        theirs += [llama_cpp.llama_sampler_init_xtc(1.0, threshold, 1, 0)]
        config = GenerationConfig(
            temperature=1, top_n_sigma=sigmas, min_p=min_p, xtc_probability=1, xtc_threshold=threshold
        )
        left, _ = Sampler(config, len(logits)).distribution(logits, 0)
        assert set(left.tolist()) == set(applied(theirs, logits))
