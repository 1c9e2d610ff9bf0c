"""Rankings: a drafter's logits as scores of candidates, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.generation import GenerationConfig
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.ranking import ByProbability, BySharedNoise, ranking_for
from edgespec.speculation.sampling import Sampler

_N_VOCAB = 40
_SAMPLING = GenerationConfig(temperature=0.8)


def _logits(seed: int, rows: int = 2, scale: float = 2.0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(scale=scale, size=(rows, _N_VOCAB))
    return torch.from_numpy(values.astype(np.float32))


def test_by_probability_gives_log_softmax_best_first() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])) + 7
    best = ByProbability().best(logits, [3, 4], 2)
    assert best.tokens.tolist()[0] == [1, 2]
    assert best.tokens[1, 0] == 2
    np.testing.assert_allclose(np.exp(best.logprobs), [[0.6, 0.3], [0.5, 0.25]], rtol=1e-5)
    assert best.tokens.dtype == np.int32
    assert best.logprobs.dtype == np.float32


def test_asking_for_more_than_the_vocabulary_gives_all_of_it() -> None:
    logits = torch.zeros(1, 3)
    for ranking in (ByProbability(), BySharedNoise(_SAMPLING, GumbelNoise(0, 3))):
        best = ranking.best(logits, [0], 8)
        assert sorted(best.tokens[0].tolist()) == [0, 1, 2]
        assert np.exp(best.logprobs).sum() == pytest.approx(1, rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, _N_VOCAB), st.sampled_from([0.2, 1.0, 3.0]))
def test_shared_noise_ranks_by_what_the_target_would_draw(seed: int, count: int, temperature: float) -> None:
    noise = GumbelNoise(seed, _N_VOCAB)
    logits = _logits(seed, rows=3)
    positions = [5, 5, 9]
    best = BySharedNoise(GenerationConfig(temperature=temperature), noise).best(logits, positions, count)
    assert best.tokens.shape == best.logprobs.shape == (3, count)
    for row, position in enumerate(positions):
        perturbed = logits[row].numpy().astype(np.float64) / temperature + noise.at(position)
        assert best.tokens[row].tolist() == np.argsort(-perturbed)[:count].tolist()
        chances = np.exp((perturbed - perturbed.max()) / 0.6)
        expected = np.sort(np.log(chances / chances.sum()))[::-1][:count]
        np.testing.assert_allclose(best.logprobs[row], expected, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.sampled_from([0.1, 1.0, 2.0]))
def test_a_drafter_equal_to_the_target_ranks_the_targets_draw_first(
    seed: int, position: int, temperature: float
) -> None:
    config = GenerationConfig(temperature=temperature)
    sampler = Sampler(config, _N_VOCAB, seed)
    logits = _logits(position, rows=1)
    best = ranking_for(config, sampler.noise).best(logits, [position], 3)
    assert best.tokens[0, 0] == sampler.choose(logits[0].numpy(), [0] * position)


def test_only_tokens_the_target_may_draw_are_candidates() -> None:
    config = GenerationConfig(temperature=5, top_k=3)
    logits = _logits(0, rows=1)
    likeliest = set(logits[0].topk(3).indices.tolist())
    for seed in range(20):
        best = BySharedNoise(config, GumbelNoise(seed, _N_VOCAB)).best(logits, [0], 8)
        assert set(best.tokens[0].tolist()) == likeliest


def test_logits_are_not_changed() -> None:
    logits = _logits(1)
    before = logits.clone()
    for ranking in (ByProbability(), BySharedNoise(_SAMPLING, GumbelNoise(0, _N_VOCAB))):
        ranking.best(logits, [1, 2], 4)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-38])
def test_next_to_no_temperature_is_ranked_by_logit(temperature: float) -> None:
    logits = torch.tensor([[30.0, 80.0, -40.0, 79.0]])
    config = GenerationConfig(temperature=temperature)
    best = BySharedNoise(config, GumbelNoise(0, 4)).best(logits, [0], 4)
    assert best.tokens[0, 0] == 1
    assert best.logprobs[0, 0] == 0
    assert not np.isnan(best.logprobs).any()


def test_greedy_targets_get_the_ranking_without_noise() -> None:
    noise = GumbelNoise(0, 4)
    assert isinstance(ranking_for(GenerationConfig(), noise), ByProbability)
    assert isinstance(ranking_for(GenerationConfig(temperature=0.1), noise), BySharedNoise)
