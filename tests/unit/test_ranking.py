"""Rankings: from a drafter's logits to scored candidates, with values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.generation.config import GenerationConfig
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.growth import Frontier
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.ranking import AdjustedRanking, CalibratedRanking, ProbabilityRanking
from edgespec.speculation.sampling import Sampler
from edgespec.speculation.spelling import Spelling
from edgespec.speculation.tree import FloatArray
from tests.letters import Letters

_N_VOCAB = 40
_SAMPLING = GenerationConfig(temperature=0.8)
_PAIR = DrafterCalibration(nats=0.6)


def _logits(seed: int, rows: int = 2, scale: float = 2.0) -> FloatArray:
    values = np.random.default_rng(seed).normal(scale=scale, size=(rows, _N_VOCAB))
    return values.astype(np.float32)


def _logs(chances: list[list[float]]) -> FloatArray:
    return np.log(np.array(chances, dtype=np.float32)) + 7


def test_by_probability_gives_log_softmax_best_first() -> None:
    logits = _logs([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
    best = ProbabilityRanking().best(logits, [3, 4], 2)
    assert best.tokens.tolist()[0] == [1, 2]
    assert best.tokens[1, 0] == 2
    np.testing.assert_allclose(np.exp(best.logprobs), [[0.6, 0.3], [0.5, 0.25]], rtol=1e-5)
    assert best.tokens.dtype == np.int32
    assert best.logprobs.dtype == np.float32


def test_by_probability_takes_the_targets_temperature() -> None:
    logits = _logs([[0.1, 0.6, 0.3]])
    best = ProbabilityRanking(0.5).best(logits, [3], 3)
    np.testing.assert_allclose(np.exp(best.logprobs), [[0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46]], rtol=1e-5)
    assert ProbabilityRanking(5e-324).best(logits, [3], 3).logprobs[0].tolist()[0] == 0


def test_asking_for_more_than_the_vocabulary_gives_all_of_it() -> None:
    logits = np.zeros((1, 3), dtype=np.float32)
    for ranking in (ProbabilityRanking(), CalibratedRanking(_SAMPLING, GumbelNoise(0, 3), _PAIR)):
        best = ranking.best(logits, [0], 8)
        assert sorted(best.tokens[0].tolist()) == [0, 1, 2]
        assert np.exp(best.logprobs).sum() == pytest.approx(1, rel=1e-5)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, _N_VOCAB),
    st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    st.sampled_from([0.3, 0.6, 1.5]),
)
@example(2245, 12, 3.0, 0.3)  # two tokens with the same score in single precision
def test_agreement_ranks_by_what_the_target_would_take(
    seed: int, count: int, temperature: float, nats: float
) -> None:
    noise = GumbelNoise(seed, _N_VOCAB)
    logits = _logits(seed, rows=3)
    positions = [5, 5, 9]
    config = GenerationConfig(temperature=temperature)
    best = CalibratedRanking(config, noise, DrafterCalibration(nats=nats)).best(logits, positions, count)
    assert best.tokens.shape == best.logprobs.shape == (3, count)
    for row, position in enumerate(positions):
        scores = logits[row].astype(np.float64) + temperature * noise.at(position)
        assert len(set(best.tokens[row].tolist())) == count
        # Tokens whose scores are the same in single precision may come in either order.
        highest = np.sort(scores)[::-1][:count]
        np.testing.assert_allclose(scores[best.tokens[row]], highest, rtol=1e-6, atol=1e-5)
        chances = np.exp((scores - scores.max()) / nats)
        expected = np.sort(np.log(chances / chances.sum()))[::-1][:count]
        np.testing.assert_allclose(best.logprobs[row], expected, rtol=1e-4, atol=1e-4)


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.1, 1.0, 2.0]),
    st.sampled_from(
        [
            {},
            {"xtc_probability": 0.5, "xtc_threshold": 0.05},
            {"xtc_probability": 1.0, "xtc_threshold": 0.2, "min_p": 0.1},
            {"top_n_sigma": 1.0},
            {"top_n_sigma": 2.0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        ]
    ),
)
def test_a_drafter_equal_to_the_target_ranks_the_targets_choice_first(
    seed: int, position: int, temperature: float, filters: dict[str, float]
) -> None:
    config = GenerationConfig(temperature=temperature).with_(**filters)
    sampler = Sampler(config, _N_VOCAB, seed)
    logits = _logits(position, rows=1)
    # A drafter that is never wrong: filters cut it where they cut the target.
    best = CalibratedRanking(config, sampler.noise, DrafterCalibration(nats=1e-6)).best(logits, [position], 3)
    assert best.tokens[0, 0] == sampler.choose(logits[0], [0] * position)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([0, 2, 64]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([(), ("10", "2"), ("00", "3", "1")]),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_what_changes_logits_on_a_path_is_that_of_the_target(
    seed: int,
    temperature: float,
    repeat: float,
    presence: float,
    window: int,
    repetition: float,
    banned: tuple[str, ...],
    text: list[int],
    path: list[int],
) -> None:
    config = GenerationConfig(
        temperature=temperature,
        repeat_penalty=repeat,
        presence_penalty=presence,
        penalty_window=window,
        dry_multiplier=repetition,
        dry_sequence_breakers=("2",),
        banned_strings=banned,
        logit_bias=((3, 1.5), (_N_VOCAB + 5, 9.0)),
    )
    spelling = Spelling(Letters([str(token) for token in range(_N_VOCAB)]))
    adjustments = Adjustments(config, _N_VOCAB, spelling, 1)
    sampler = Sampler(config, _N_VOCAB, seed, adjustments=adjustments)
    inner = CalibratedRanking(config, sampler.noise, _PAIR)
    ranking = AdjustedRanking(inner, sampler.adjustments)
    ranking.begin(text)
    logits = _logits(seed, rows=1)
    kept = logits.copy()
    for depth, token in enumerate([text[-1], *path]):
        node = np.array([[depth], [token], [depth - 1], [depth]], dtype=np.int32)
        ranking.before_ranking(Frontier(*node), [0])
        best = ranking.best(logits, [len(text) + depth], 3)
    assert best.tokens[0, 0] == sampler.choose(logits[0], [*text, *path])
    assert np.array_equal(logits, kept)


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 30, "top_p": 0.9, "min_p": 0.2}]
)
def test_only_tokens_the_target_may_draw_are_candidates(filters: dict[str, float]) -> None:
    config = GenerationConfig(temperature=5.0).with_(**filters)
    logits = _logits(0, rows=1)
    allowed = set(Sampler(config, _N_VOCAB).distribution(logits[0], 0)[0].tolist())
    assert 1 < len(allowed) < 25
    for seed in range(20):
        best = CalibratedRanking(config, GumbelNoise(seed, _N_VOCAB), DrafterCalibration(nats=0.05)).best(
            logits, [0], 1
        )
        assert int(best.tokens[0, 0]) in allowed


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([40, 300, 2000]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.sampled_from([0, 1, 20, 500]),
    st.sampled_from([0.3, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_filters_leave_the_candidates_that_all_the_noise_would(
    seed: int, n_vocab: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    config = GenerationConfig(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    pair, noise = DrafterCalibration(), GumbelNoise(seed, n_vocab)
    logits = np.random.default_rng(seed).normal(0, spread, (2, n_vocab)).astype(np.float32)
    values, tokens = CalibratedRanking(config, noise, pair).candidates(logits, [3, 4])
    for row in range(2):
        best = np.sort(logits[row])[::-1][:256]
        cuts = [-np.inf]
        if 0 < top_k <= len(best) and top_k < n_vocab:
            cuts.append(best[top_k - 1])
        if top_p < 1:
            chances = np.exp(best - best[0])
            before = np.cumsum(chances / chances.sum()) - chances / chances.sum()
            cuts.append(best[before < top_p + 1e-7][-1])
        if min_p:
            cuts.append(best[0] + np.log(min_p))
        scores = logits[row] + (0.7 * noise.at(3 + row)).astype(np.float32)
        scores[logits[row] < max(cuts) - pair.nats - 1e-6] = -np.inf
        expected = np.sort(scores)[::-1][:64]
        assert np.array_equal(values[row], expected)
        assert np.array_equal(scores[tokens[row]], expected)
        assert len(set(tokens[row].tolist())) == len(expected)


def test_logits_are_not_changed() -> None:
    logits = _logits(1)
    before = logits.copy()
    filtered = GenerationConfig(temperature=1.0, top_p=0.9)
    for config in (GenerationConfig(), _SAMPLING, filtered):
        for ranking in (ProbabilityRanking(0.5), CalibratedRanking(config, GumbelNoise(0, _N_VOCAB), _PAIR)):
            ranking.best(logits, [1, 2], 4)
            assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-38])
def test_next_to_no_temperature_is_ranked_by_logit(temperature: float) -> None:
    logits = np.array([[30.0, 80.0, -40.0, 79.0]], dtype=np.float32)
    config = GenerationConfig(temperature=temperature)
    best = CalibratedRanking(config, GumbelNoise(0, 4), _PAIR).best(logits, [0], 4)
    assert best.tokens[0].tolist() == [1, 3, 0, 2]
    assert not np.isnan(best.logprobs).any()


def test_noise_of_many_positions_is_the_noise_of_each() -> None:
    ranking = CalibratedRanking(_SAMPLING, GumbelNoise(4, _N_VOCAB), _PAIR)
    logits = _logits(2, rows=1)
    first = ranking.best(logits, [7], 5)
    for position in range(200):
        ranking.best(logits, [position], 5)
    assert ranking.best(logits, [7], 5).tokens.tolist() == first.tokens.tolist()
