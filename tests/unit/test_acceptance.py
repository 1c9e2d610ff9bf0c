"""The learned map from a drafter's chances to acceptance: prior, evidence, monotony, and the next run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.speculation.acceptance import Calibrated
from edgespec.speculation.counts import TableStore
from edgespec.speculation.growth import Children
from edgespec.speculation.ranking import Disagreement

_ROOT = np.zeros(1, dtype=np.int32)


def _row(chances: list[float], matches: list[int] | None = None) -> Children:
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array([chances], dtype=np.float64)).astype(np.float32)
    tokens = np.arange(len(chances), dtype=np.int32)[None]
    return Children(tokens, logprobs, None if matches is None else np.array([matches], dtype=np.int32))


def _learn(chances: Calibrated, row: Children, taken: int) -> None:
    chances.learn(row, _ROOT, np.array([taken], dtype=np.int32))


def _chances(calibrated: Calibrated, row: Children) -> list[float]:
    return [float(chance) for chance in np.exp(calibrated.edges(row, _ROOT)[0])]


def test_without_evidence_the_drafter_is_believed() -> None:
    row = [0.9, 0.06, 0.02, 0.01, 0.005]
    assert _chances(Calibrated(TableStore(), "x"), _row(row)) == pytest.approx(row, rel=0.12)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.999), st.integers(0, 2), st.integers(0, 5)), max_size=60),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_likelier_candidate_never_gets_a_lower_chance(
    evidence: list[tuple[float, int, int]], rank: int, match: int
) -> None:
    calibrated = Calibrated(TableStore(), "x")
    for chance, taken, matched in evidence:
        left = 1 - chance
        _learn(calibrated, _row([chance, left * 0.7, left * 0.2], [matched, 0, 1]), taken - 1)
    assert (np.diff(calibrated.map, axis=-1)[:4] > 0).all()
    asked = [0.0005, 0.01, 0.2, 0.201, 0.5, 0.9, 0.999]
    answers = []
    for chance in asked:
        row, matches = [1e-9] * 5, [0] * 5
        row[rank], matches[rank] = chance, match
        answers.append(_chances(calibrated, _row(row, matches))[rank])
    assert answers == sorted(answers)
    assert all(0 < answer <= 1 for answer in answers)


@settings(max_examples=8)
@given(st.floats(0.4, 2.2), st.floats(-1.5, 1.0), st.integers(0, 2**32 - 1))
def test_converges_to_the_truth(slope: float, shift: float, seed: int) -> None:
    """The target takes the drafter's first candidate with some other chance than the drafter says."""
    rng = np.random.default_rng(seed)
    calibrated = Calibrated(TableStore(), "x")

    def truth(chance: float) -> float:
        return float(1 / (1 + np.exp(-(slope * np.log(chance / (1 - chance)) + shift))))

    for _ in range(6000):
        chance = float(rng.uniform(0.05, 0.98))
        taken = 0 if rng.random() < truth(chance) else -1
        _learn(calibrated, _row([chance, (1 - chance) / 2]), taken)
    for chance in (0.15, 0.5, 0.85):
        learned = _chances(calibrated, _row([chance, (1 - chance) / 2]))[0]
        assert learned == pytest.approx(truth(chance), abs=0.09)


@pytest.mark.parametrize("nats", [0.35, 0.65, 1.4])
def test_the_pairs_disagreement_is_found(nats: float) -> None:
    rng = np.random.default_rng(3)
    pair = Disagreement()
    calibrated = Calibrated(TableStore(), "x", pair)
    for _ in range(3000):
        logits = rng.normal(scale=2.0, size=12)
        taken = int(np.argmax(logits + nats * rng.gumbel(size=12)))
        order = np.argsort(-logits)[:8]
        scores = logits[order] / pair.nats
        places = np.flatnonzero(order == taken)
        _learn(
            calibrated,
            Children(
                order[None].astype(np.int32),
                (scores - np.logaddexp.reduce(logits / pair.nats))[None].astype(np.float32),
            ),
            int(places[0]) if len(places) else -1,
        )
    assert pair.nats == pytest.approx(nats, rel=0.1)


def test_what_the_text_proposes_has_chances_of_its_own() -> None:
    calibrated = Calibrated(TableStore(), "x")
    alone = _chances(calibrated, _row([0, 0, 0], [1, 4, 0]))
    assert alone[0] < 0.3 < 0.7 < alone[1]
    assert alone[2] == 0
    doubted = _chances(calibrated, _row([0.9, 0.1, 0], [0, 0, 4]))
    assert doubted[2] < 0.1
    agreed = _chances(calibrated, _row([0.6, 0.1], [4, 0]))
    assert agreed[0] > _chances(calibrated, _row([0.6, 0.1]))[0] > agreed[1]
    for _ in range(200):
        _learn(calibrated, _row([0, 0], [4, 0]), -1)
    assert _chances(calibrated, _row([0, 0], [4, 0]))[0] < 0.1


def test_what_was_learned_is_there_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pair.json"
    first = Calibrated(TableStore(path), "greedy")
    row = _row([0.5, 0.3])
    before = _chances(first, row)
    for _ in range(300):
        _learn(first, row, 1)
    learned = _chances(first, row)
    assert learned[0] < 0.2 < 0.8 < learned[1]
    first.keep()
    assert [entry.name for entry in path.parent.iterdir()] == ["pair.json"]
    again = Calibrated(TableStore(path), "greedy")
    assert _chances(again, row) == pytest.approx(learned, abs=1e-3)
    assert again.pair.nats == pytest.approx(first.pair.nats, abs=1e-3)
    assert _chances(Calibrated(TableStore(path), "sampled"), row) == before, "each has its own"


def test_a_store_keeps_what_others_put_there(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    for name in ("greedy", "sampled"):
        one = Calibrated(TableStore(path), name)
        for _ in range(50):
            _learn(one, _row([0.5]), -1)
        one.keep()
    for name in ("greedy", "sampled"):
        assert _chances(Calibrated(TableStore(path), name), _row([0.5]))[0] < 0.3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "tables": {}}',
        '{"version": 1}',
        '{"version": 1, "tables": []}',
        '{"version": 1, "tables": {"x map": "none"}}',
        '{"version": 1, "tables": {"x map": [[1, 2], [3]]}}',
        '{"version": 1, "tables": {"x map": [1, 2], "x disagreement": [1]}}',
        '{"version": 1, "tables": {"x disagreement": [NaN, 1]}}',
        '{"version": 1, "tables": {"x disagreement": [-1, 1]}}',
        '{"version": 1, "tables": {"x disagreement": [1e30, 1]}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pair.json"
    path.write_text(content)
    calibrated = Calibrated(TableStore(path), "x")
    row = _row([0.7, 0.2])
    assert _chances(calibrated, row) == _chances(Calibrated(TableStore(), "x"), row)
    _learn(calibrated, row, 0)
    calibrated.keep()
    assert json.loads(path.read_text())["version"] == 1


def test_more_taken_than_tried_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    one = Calibrated(TableStore(path), "x")
    _learn(one, _row([0.5]), 0)
    one.keep()
    stored = json.loads(path.read_text())
    tried, taken = stored["tables"]["x map"]
    stored["tables"]["x map"] = [taken, (1e6 * np.array(tried)).tolist()]
    path.write_text(json.dumps(stored))
    assert 0 < _chances(Calibrated(TableStore(path), "x"), _row([0.5]))[0] < 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calibrated = Calibrated(TableStore(tmp_path / "file" / "pair.json"), "x")
    _learn(calibrated, _row([0.5]), 0)
    calibrated.keep()


def test_pairs_have_files_of_their_own(tmp_path: Path) -> None:
    for pair in (("a", "b"), ("a", "c"), ("b", "a")):
        store = TableStore.for_pair(tmp_path, pair)
        store.put("x", np.ones(1))
        store.keep()
    assert len(list(tmp_path.iterdir())) == 3
