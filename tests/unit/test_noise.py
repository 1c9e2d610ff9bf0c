"""Shared noise: fixed by seed and position alone, and Gumbel distributed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.generation.config import MAX_SEED
from edgespec.speculation.noise import GumbelNoise, NoiseCache, NoiseStream, noise_bytes

_VOCABULARY = 50


@given(
    seed=st.integers(0, MAX_SEED),
    positions=st.lists(st.integers(0, 2**31), min_size=1, max_size=6),
    tokens=st.lists(st.integers(0, _VOCABULARY - 1), min_size=1, max_size=8),
    shuffle=st.randoms(use_true_random=False),
)
def test_noise_is_the_same_in_any_order_and_for_any_subset(
    seed: int, positions: list[int], tokens: list[int], shuffle: random.Random
) -> None:
    noise = GumbelNoise(seed, _VOCABULARY)
    whole = {position: noise.at(position) for position in positions}
    again = positions[:]
    shuffle.shuffle(again)
    other = GumbelNoise(seed, _VOCABULARY)
    for position in again:
        some = other.at(position, np.array(tokens))
        assert np.array_equal(some, whole[position][tokens])
        assert np.array_equal(other.at(position), whole[position])
    assert all(np.isfinite(values).all() for values in whole.values())


def test_a_larger_vocabulary_does_not_change_the_noise_of_a_token() -> None:
    # Padding at the end of a vocabulary then does not matter.
    assert np.array_equal(GumbelNoise(3, 100).at(9)[:37], GumbelNoise(3, 37).at(9))


def test_more_positions_than_are_remembered_stay_the_same() -> None:
    noise = GumbelNoise(11, 8)
    first = [noise.at(position) for position in range(100)]
    assert np.array_equal([noise.at(position) for position in range(100)], first)


@pytest.mark.parametrize("apart", [1, 2, 1000])
def test_positions_and_seeds_are_independent(apart: int) -> None:
    n = 20_000
    base = GumbelNoise(5, n).at(17)
    for other in (GumbelNoise(5, n).at(17 + apart), GumbelNoise(5 + apart, n).at(17)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(n)
        # Nor is one the other shifted by a few tokens.
        for shift in range(1, 9):
            assert abs(np.corrcoef(base[shift:], other[:-shift])[0, 1]) < 4 / np.sqrt(n)
            assert not np.isin(other[:100], base).any()


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
def test_noise_is_gumbel_distributed(seed: int) -> None:
    n = 20_000
    along_tokens = GumbelNoise(seed, n).at(3)
    noise = GumbelNoise(seed, 4)
    along_positions = np.concatenate([noise.at(position) for position in range(n // 4)])
    for sample in (along_tokens, along_positions):
        cdf = np.exp(-np.exp(-np.sort(sample)))
        # Kolmogorov-Smirnov; 1.95 is exceeded by 1 sample in 1000, and the samples are fixed.
        steps = np.arange(n + 1) / n
        distance = max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max())
        assert distance * np.sqrt(n) < 1.95


def test_the_noise_of_a_seed_never_changes_between_versions() -> None:
    # Texts sampled with a seed are promised to stay the same.
    assert GumbelNoise(1, 3).at(5).tolist() == pytest.approx(
        [-0.3459807926009499, 1.6945308620750934, -0.10075660335372881], rel=1e-14
    )
    assert GumbelNoise(2**63 - 1, 3).at(0).tolist() == pytest.approx(
        [2.562784357224962, -0.5342174763825905, 0.7355639745289242], rel=1e-14
    )
    assert GumbelNoise(MAX_SEED, 3).at(0).tolist() == pytest.approx(
        [-0.37047217268875954, 1.10187922521524, 0.11796102219533774], rel=1e-14
    )


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["lowest", "highest"])
def test_the_most_extreme_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = GumbelNoise(0, 1)
    monkeypatch.setattr(noise, "_draw", lambda position: np.array([bits], dtype=np.uint64))
    assert np.isfinite(noise.at(0)).all()


def test_seeds_that_differ_only_in_high_bits_differ() -> None:
    values = [GumbelNoise(seed, 4).at(0).tolist() for seed in (1, 1 + 2**32, 1 + 2**62, MAX_SEED)]
    assert len({tuple(v) for v in values}) == 4


@given(st.integers(1, 300_000), st.booleans(), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=80))
def test_noise_of_several_answers_is_kept_within_what_is_planned(
    n_vocab: int, drafts: bool, answers: int, positions: list[int]
) -> None:
    planned = noise_bytes(n_vocab, drafts=drafts, answers=answers)
    cache = NoiseCache(planned)
    held = 0
    sizes: dict[int, int] = {}

    def make() -> np.ndarray:
        return np.broadcast_to(np.uint64(position), n_vocab)  # of that size, without the memory

    for position in positions:
        array = cache.at(position, make)
        assert array[0] == position
        assert cache.at(position, lambda: pytest.fail("the latest is kept")) is array
        sizes[position] = array.nbytes
    held = sum(size for position, size in sizes.items() if _is_kept(cache, position))
    assert held <= max(planned, 8 * n_vocab)


def _is_kept(cache: NoiseCache, position: int) -> bool:
    made: list[int] = []
    cache.at(position, lambda: made.append(position) or np.zeros(0))
    return not made


@pytest.mark.parametrize("n_vocab", [40, 49_152, 262_144])
def test_the_positions_of_a_tree_are_drawn_once(n_vocab: int) -> None:
    made: list[int] = []

    def make(position: int) -> np.ndarray:
        made.append(position)
        return np.zeros(n_vocab, dtype=np.float32)

    cache = NoiseCache(noise_bytes(n_vocab, drafts=True))
    positions = [0, 1, 1, 2, 2, 3, 4, 4, 3, 2, 0]
    for position in positions:
        cache.at(position, lambda position=position: make(position))
    assert made == sorted(set(positions))


def test_answers_that_share_a_cache_draw_as_they_would_alone() -> None:
    cache = NoiseCache()
    shared = [GumbelNoise(seed, 40, stream, cache) for seed in (1, 2) for stream in NoiseStream]
    alone = [GumbelNoise(seed, 40, stream) for seed in (1, 2) for stream in NoiseStream]
    for position in (3, 4, 3):
        for one, other in zip(shared, alone, strict=True):
            assert np.array_equal(one.at(position), other.at(position))
            for temperature in (0.5, 1.0):
                assert np.array_equal(one.scaled(position, temperature), other.scaled(position, temperature))


@given(
    st.integers(0, 2**40),
    st.integers(0, 5000),
    st.lists(st.integers(0, 999), max_size=80),
    st.sampled_from(list(NoiseStream)),
)
def test_the_noise_of_a_few_tokens_is_that_of_all(
    seed: int, position: int, tokens: list[int], stream: NoiseStream
) -> None:
    few = np.array(tokens, dtype=np.int64)
    noise = GumbelNoise(seed, 1000, stream)
    found = noise.of_few(position, few)
    assert np.array_equal(found, GumbelNoise(seed, 1000, stream).at(position)[few])
    noise.at(position)
    assert np.array_equal(found, noise.of_few(position, few)), "whether it is kept or not"
