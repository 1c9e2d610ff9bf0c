"""Learning about a pair, disagreement and biases, against known targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.profiles.table_file import TableFile
from edgespec.speculation.growth import Children
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration

_VOCABULARY = 12


def _candidates(
    calibration: DrafterCalibration, logits: np.ndarray, after: int = 0, count: int = 8
) -> Children:
    order = np.argsort(-logits)[None].astype(np.int32)
    return calibration.children(order, logits[order], np.array([after], dtype=np.int32), count)


def _led_by(
    calibration: DrafterCalibration, nats: float, bias: np.ndarray, steps: int, seed: int = 0
) -> None:
    """Show the pair what a target takes whose logits are the drafter's plus errors and biases."""
    rng = np.random.default_rng(seed)
    after = 0
    for _ in range(steps):
        logits = rng.normal(scale=2.0, size=_VOCABULARY)
        wanted = logits + bias[after] + nats * rng.gumbel(size=_VOCABULARY)
        taken = int(np.argmax(wanted))
        calibration.learn(_candidates(calibration, logits, after), after, taken)
        after = taken


@pytest.mark.parametrize("nats", [0.35, 0.65, 1.2])
def test_the_disagreement_is_found(nats: float) -> None:
    calibration = DrafterCalibration()
    _led_by(calibration, nats, np.zeros((_VOCABULARY, _VOCABULARY)), 3000)
    assert calibration.nats == pytest.approx(nats, rel=0.2)


def test_the_biases_of_tokens_are_found() -> None:
    bias = np.zeros((_VOCABULARY, _VOCABULARY))
    bias[:, 3], bias[:, 5] = 2.0, -2.0
    calibration = DrafterCalibration()
    _led_by(calibration, 0.65, bias, 1500)
    best = _candidates(calibration, np.zeros(_VOCABULARY), count=_VOCABULARY)
    assert best.tokens[0, 0] == 3
    assert best.tokens[0, -1] == 5
    assert calibration.nats == pytest.approx(0.65, rel=0.25)


def test_the_biases_of_tokens_after_others_are_found() -> None:
    bias = np.zeros((_VOCABULARY, _VOCABULARY))
    bias[2, 7], bias[4, 7] = 3.0, -3.0
    calibration = DrafterCalibration()
    _led_by(calibration, 0.65, bias, 3000)
    assert _candidates(calibration, np.zeros(_VOCABULARY), after=2).tokens[0, 0] == 7
    assert _candidates(calibration, np.zeros(_VOCABULARY), after=4, count=_VOCABULARY).tokens[0, -1] == 7


def test_a_token_that_was_no_candidate_becomes_one() -> None:
    calibration = DrafterCalibration()
    logits = np.array([3.0, 2.0, 1.0, 0.0])
    for _ in range(60):
        listed = _candidates(calibration, logits, count=2)
        calibration.learn(listed, after=0, token=3)
    assert 3 in _candidates(calibration, logits, count=2).tokens


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.1, 3))
def test_untaught_it_is_a_softmax_of_logits_over_nats(seed: int, count: int, nats: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=3.0, size=_VOCABULARY)
    best = _candidates(DrafterCalibration(nats=nats), logits, count=count)
    chances = np.exp((logits - logits.max()) / nats)
    expected = np.sort(chances / chances.sum())[::-1][:count]
    np.testing.assert_allclose(np.exp(best.logprobs[0]), expected, rtol=1e-4, atol=1e-7)
    assert best.tokens[0].tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 300_000)), max_size=80))
def test_whatever_happens_chances_stay_chances(events: list[tuple[int, int]]) -> None:
    calibration = DrafterCalibration()
    logits = np.linspace(4, -4, _VOCABULARY)
    for after, token in events:
        best = _candidates(calibration, logits, after)
        assert np.isfinite(best.logprobs).all()
        assert (best.logprobs <= 0).all()
        assert (np.diff(best.logprobs) <= 0).all()
        calibration.learn(best, after, token)
    assert 0.1 <= calibration.nats <= 5


def test_it_is_the_same_in_the_next_run(tmp_path: Path) -> None:
    bias = np.zeros((_VOCABULARY, _VOCABULARY))
    bias[:, 3] = 2.0
    store = TableFile(tmp_path / "pair.npz")
    calibration = DrafterCalibration(store)
    _led_by(calibration, 1.0, bias, 300)
    calibration.flush()
    store.save()
    again = DrafterCalibration(TableFile(tmp_path / "pair.npz"))
    logits = np.random.default_rng(1).normal(size=_VOCABULARY)
    known, found = _candidates(calibration, logits), _candidates(again, logits)
    assert found.tokens.tolist() == known.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, known.logprobs, atol=1e-4)


def test_without_the_secret_the_file_does_not_say_which_tokens_were_written(tmp_path: Path) -> None:
    store = TableFile(tmp_path / "pair.npz", secret=1)
    calibration = DrafterCalibration(store)
    for after, token in ((2, 7), (7, 4), (4, 9)) * 5:
        calibration.learn(_candidates(calibration, np.zeros(_VOCABULARY), after), after, token)
    calibration.flush()
    store.save()
    for secret, knows in ((1, True), (2, False), (1 << 100, False)):
        reader = DrafterCalibration(TableFile(tmp_path / "pair.npz", secret))
        for after, token in ((2, 7), (7, 4), (4, 9)):
            found = _candidates(reader, np.zeros(_VOCABULARY), after, count=_VOCABULARY)
            assert (found.tokens[0, 0] == token and found.logprobs[0, 0] > found.logprobs[0, 1]) == knows
            assert knows or np.ptp(found.logprobs) == 0


def test_nothing_is_written_where_nothing_was_learned(tmp_path: Path) -> None:
    store = TableFile(tmp_path / "pair.npz")
    DrafterCalibration(store).flush()
    store.save()
    assert list(tmp_path.iterdir()) == []
