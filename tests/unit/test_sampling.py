"""The sampler against a slow and simple reference, and the distribution of its draws."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.generation.config import GenerationConfig
from edgespec.speculation import noise
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.sampling import Sampler
from tests.tiers import examples

# Few distinct values, so that ties are common; -17 lies beyond the near tokens of the top-p search.
_LOGIT = st.sampled_from([-math.inf, -40.0, -17.0, -3.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.0, 7.5]) | st.floats(
    -30, 30, width=32
)
_LOGITS = (
    st.lists(_LOGIT, min_size=1, max_size=40)
    .filter(lambda values: max(values) > -math.inf)
    .map(lambda values: np.array(values, dtype=np.float32))
)
_FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.7, 1.0, 5.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-9, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-12, 0.05, 0.5, 1.0]),
    }
).map(lambda values: GenerationConfig(**values))


def _filtered(logits: np.ndarray, config: GenerationConfig) -> list[float]:
    """The logits that survive the filters, best first, by following their definitions."""
    kept = sorted((float(x) for x in logits), reverse=True)
    if config.top_k:
        kept = kept[: config.top_k]
    if config.top_p < 1:
        total = math.fsum(math.exp(x - kept[0]) for x in kept)
        sums = [math.fsum(math.exp(x - kept[0]) for x in kept[: n + 1]) / total for n in range(len(kept))]
        if any(abs(reached - config.top_p) < 1e-12 for reached in sums[:-1]):
            reject()  # rounding decides
        kept = kept[: 1 + sum(reached < config.top_p for reached in sums[:-1])]
    if config.min_p:
        kept = [x for x in kept if x >= kept[0] + math.log(config.min_p)]
    return kept


@given(_LOGITS, _FILTERS)
def test_filters_keep_what_their_definitions_say(logits: np.ndarray, config: GenerationConfig) -> None:
    before = logits.copy()
    tokens, scores = Sampler(config, len(logits)).distribution(logits, 0)
    assert len(set(tokens.tolist())) == len(tokens)
    kept = sorted((float(x) for x in logits[tokens]), reverse=True)
    assert kept == _filtered(logits, config)
    # Scores are the logits over the temperature, up to a constant.
    assert scores.dtype == np.float64
    expected = (logits[tokens].astype(np.float64) - kept[0]) / config.temperature
    assert np.allclose(scores - scores.max(), expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(logits, before)


@given(_LOGITS, _FILTERS, st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_every_token_keeps_its_own_noise_whatever_is_filtered(
    logits: np.ndarray, config: GenerationConfig, seed: int, position: int
) -> None:
    # A drafter sees other candidates, and must meet the same noise.
    sampler = Sampler(config, len(logits), seed)
    tokens, scores = sampler.distribution(logits, 0)
    noise = GumbelNoise(seed, len(logits)).at(position)
    perturbed = {token: score + noise[token] for token, score in zip(tokens.tolist(), scores, strict=True)}
    assert sampler.choose(logits, [0] * position) == max(perturbed, key=perturbed.__getitem__)


@given(_LOGITS, _FILTERS, st.integers(0, 2**64 - 1), st.lists(st.integers(0, 0), max_size=3))
def test_the_drawn_token_survived_the_filters_and_has_a_chance(
    logits: np.ndarray, config: GenerationConfig, seed: int, text: list[int]
) -> None:
    token = Sampler(config, len(logits), seed).choose(logits, text)
    assert isinstance(token, int)
    assert logits[token] > -math.inf
    assert logits[token] >= min(_filtered(logits, config))


def test_top_p_counts_the_many_tokens_far_below_the_best() -> None:
    logits = np.full(1 << 20, -17.0, dtype=np.float32)
    logits[3] = 0
    far = math.exp(-17) * (len(logits) - 1)
    assert far / (1 + far) > 0.03, "together the far ones matter"
    for top_p in (0.9, 0.97, 0.99):
        config = GenerationConfig(temperature=1, top_p=top_p)
        tokens, _ = Sampler(config, len(logits)).distribution(logits, 0)
        missing = top_p * (1 + far) - 1
        assert len(tokens) == max(1 + math.ceil(missing / math.exp(-17)), 1)
        assert tokens[0] == 3


@given(_LOGITS)
def test_greedy_takes_the_first_of_the_likeliest(logits: np.ndarray) -> None:
    sampler = Sampler(GenerationConfig(top_k=2, top_p=0.5, min_p=0.5), len(logits))
    assert sampler.choose(logits, []) == logits.tolist().index(max(logits.tolist()))


@given(
    logits=st.lists(_LOGIT, min_size=4, max_size=4).map(lambda v: np.array(v, dtype=np.float32)),
    text=st.lists(st.integers(0, 3), max_size=12),
    repeat=st.sampled_from([0.5, 1.0, 1.3]),
    frequency=st.sampled_from([-0.5, 0.0, 0.7]),
    presence=st.sampled_from([-1.0, 0.0, 0.4]),
    window=st.sampled_from([0, 1, 3, 64]),
    split=st.integers(0, 12),
)
def test_penalties_by_their_definition(
    logits: np.ndarray,
    text: list[int],
    repeat: float,
    frequency: float,
    presence: float,
    window: int,
    split: int,
) -> None:
    config = GenerationConfig(
        repeat_penalty=repeat, frequency_penalty=frequency, presence_penalty=presence, penalty_window=window
    )
    before = logits.copy()
    counts = Counter(text[len(text) - window :] if 0 < window < len(text) else text)
    expected = []
    for token, logit in enumerate(logits.tolist()):
        if counts[token]:
            logit = logit / repeat if logit > 0 else logit * repeat
            logit -= counts[token] * frequency + presence
        expected.append(logit)
    sampler = Sampler(config, len(logits))
    adjusted = logits.copy()
    original = sampler.adjustments.adjust(adjusted, text[:split], text[split:])
    assert np.allclose(adjusted, expected, rtol=1e-6, atol=1e-6)
    original.restore()
    assert np.array_equal(adjusted, before)
    chosen = sampler.choose(logits, text)
    assert expected[chosen] == pytest.approx(max(expected), abs=1e-5)
    assert np.array_equal(logits, before)


def test_a_bias_is_added_before_penalties_and_filters() -> None:
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    before = logits.copy()
    for config in (
        GenerationConfig(logit_bias=((1, 2.0), (7, 100.0))),
        GenerationConfig(logit_bias=((1, 2.0),), temperature=1, top_k=1),
        GenerationConfig(logit_bias=((0, -100.0), (1, -0.5)), repeat_penalty=1.01),
    ):
        assert Sampler(config, 3).choose(logits, [2]) == 1
        if not config.greedy:
            assert Sampler(config, 3).law(logits, [2]).tolist() == [0, 1, 0]
    assert np.array_equal(logits, before)


def test_penalties_apply_before_the_filters() -> None:
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    config = GenerationConfig(temperature=1, top_k=1, presence_penalty=10)
    assert {Sampler(config, 3, seed).choose(logits, [0]) for seed in range(20)} == {1}


def test_a_logit_of_minus_infinity_stays_impossible_under_penalties() -> None:
    logits = np.array([-np.inf, 0.0], dtype=np.float32)
    config = GenerationConfig(temperature=1, repeat_penalty=1.5, frequency_penalty=-100)
    assert {Sampler(config, 2, seed).choose(logits, [0, 0]) for seed in range(50)} == {1}


def test_a_read_only_view_is_enough() -> None:
    logits = np.array([0.0, 1.0], dtype=np.float32)
    logits.flags.writeable = False
    for config in (GenerationConfig(), GenerationConfig(temperature=1, presence_penalty=1, top_p=0.9)):
        Sampler(config, 2).choose(logits, [1])


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-38, 1e-6])
def test_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = np.array([30.0, 80.0, -40.0, 79.0], dtype=np.float32)
    config = GenerationConfig(temperature=temperature)
    assert {Sampler(config, 4, seed).choose(logits, [0] * seed) for seed in range(30)} == {1}


# The law of the draws. Seeds are fixed, so these either always pass or never.

_DRAWS = 4000
# Exceeded by chance once in a million, by degrees of freedom.
_CHI_SQUARE = {1: 24, 3: 31, 5: 36, 7: 40}


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"temperature": 1.0}, 8),
        ({"temperature": 0.5}, 8),
        ({"temperature": 2.5}, 8),
        ({"temperature": 1.0, "top_k": 4}, 4),
        ({"temperature": 1.5, "top_p": 0.9}, 6),
        ({"temperature": 1.0, "min_p": 0.5}, 2),
        ({"temperature": 1.0, "presence_penalty": 1.0}, 8),
    ],
)
def test_draws_over_positions_follow_the_distribution(settings: dict[str, float], possible: int) -> None:
    config = GenerationConfig(**settings)
    logits = np.array([1.0, 0.2, 0.8, -0.5, 0.0, 0.1, -1.0, 0.05], dtype=np.float32)
    sampler = Sampler(config, len(logits), seed=20)
    text = [1, 0] * _DRAWS
    drawn = Counter(sampler.choose(logits, text[:n]) for n in range(2, _DRAWS + 2))
    penalized = logits.astype(np.float64)
    penalized[:2] -= config.presence_penalty
    worst = _filtered(penalized, config)[-1]
    chances = np.where(penalized >= worst, np.exp(penalized / config.temperature), 0)
    expected = _DRAWS * chances / chances.sum()
    likely = np.flatnonzero(expected)
    assert len(likely) == possible
    assert set(drawn) <= set(likely.tolist())
    statistic = sum((drawn[int(token)] - expected[token]) ** 2 / expected[token] for token in likely)
    assert statistic < _CHI_SQUARE[possible - 1]


def test_draws_over_seeds_follow_the_distribution() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    config = GenerationConfig(temperature=1)
    drawn = Counter(Sampler(config, 4, seed).choose(logits, [0, 0]) for seed in range(_DRAWS))
    expected = [_DRAWS * chance for chance in (0.1, 0.2, 0.3, 0.4)]
    statistic = sum((drawn[token] - expected[token]) ** 2 / expected[token] for token in range(4))
    assert statistic < _CHI_SQUARE[3]


def test_a_seed_fixes_the_draws_and_another_gives_others() -> None:
    logits = np.zeros(100, dtype=np.float32)
    config = GenerationConfig(temperature=1)

    def texts(seed: int) -> list[int]:
        sampler = Sampler(config, 100, seed)
        return [sampler.choose(logits, [0] * n) for n in range(50)]

    assert texts(1) == texts(1)
    same = sum(a == b for a, b in zip(texts(1), texts(2), strict=True))
    assert same < 10


def test_the_draw_depends_on_the_length_of_the_text_and_not_on_its_tokens() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    sampler = Sampler(GenerationConfig(temperature=1), 1000, seed=4)
    assert sampler.choose(logits, [1, 2, 3]) == sampler.choose(logits, [7, 8, 9])
    assert sampler.choose(logits, [1, 2, 3]) != sampler.choose(logits, [1, 2, 3, 4])


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.02, 1.0, 5.0]), st.floats(0.05, 0.999), st.booleans())
def test_filters_of_large_vocabularies_leave_the_likeliest(
    seed: int, spread: float, top_p: float, rounded: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, 4000).astype(np.float32)
    if rounded:  # many are equal
        logits = np.round(logits, 1)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    sums = np.cumsum(weights)
    for top_k in (1, 40, 600):
        tokens, _ = Sampler(GenerationConfig(temperature=1, top_k=top_k), len(logits)).distribution(logits, 0)
        assert np.array_equal(np.sort(logits[tokens]), logits[order[:top_k]][::-1])
    config = GenerationConfig(temperature=1, top_p=top_p)
    tokens, scores = Sampler(config, len(logits)).distribution(logits, 0)
    assert len(tokens) == pytest.approx(np.searchsorted(sums, top_p * sums[-1]) + 1, abs=1), "up to rounding"
    assert tokens.tolist() == order[: len(tokens)].tolist()
    assert np.array_equal(scores, logits[tokens].astype(np.float64) - logits.max())


@settings(max_examples=examples(200))
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 0.5, 2.5, 6.0]),
    st.sampled_from([0.05, 1.0, 5.0]),
    st.sampled_from([0.1, 0.9, 0.999, 1.0]),
)
def test_a_large_vocabulary_is_sampled_as_definitions_say(
    seed: int, spread: float, temperature: float, top_p: float
) -> None:
    # Shortcuts for many tokens must not change what is chosen.
    logits = (spread * np.random.default_rng(seed).standard_normal(3000)).astype(np.float32)
    sampler = Sampler(GenerationConfig(temperature=temperature, top_p=top_p, top_k=0), len(logits), seed)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    kept = len(order)
    if top_p < 1:
        kept = 1 + int((np.cumsum(weights)[:-1] < top_p * weights.sum()).sum())
    tokens, _ = sampler.distribution(logits, 0)
    if spread:
        assert sorted(tokens.tolist()) == sorted(order[:kept].tolist())
    scores = (logits[tokens].astype(np.float64) - float(logits.max())) / temperature
    noise = GumbelNoise(seed, len(logits)).at(9, tokens)
    assert sampler.choose(logits, [0] * 9) == tokens[np.argmax(scores + noise)]


def test_the_noise_of_unlikely_tokens_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    gumbel = noise._gumbel

    def counted(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
        seen.append(len(bits))
        return gumbel(bits)

    monkeypatch.setattr(noise, "_gumbel", counted)
    logits = np.zeros(100_000, dtype=np.float32)
    logits[7] = 12
    Sampler(GenerationConfig(temperature=1.0, top_k=0, top_p=1.0), len(logits), 1).choose(logits, [0])
    assert sum(seen) < len(logits) / 2
