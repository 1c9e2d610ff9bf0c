"""The learned map from a drafter's probabilities to acceptance: prior, evidence, monotonicity, storage."""

from __future__ import annotations

import io
import itertools
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.planning.memory.needs import LEARNED_BYTES
from edgespec.profiles.table_file import TableFile
from edgespec.speculation.evidence import (
    NOTHING,
    OTHERS,
    CandidateSource,
    RecycledFrom,
    occurrence_class,
    recycled_classes,
)
from edgespec.speculation.growth import Children
from edgespec.speculation.learning.acceptance import CalibratedAcceptance
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import TableStore


def _row(
    chances: list[float], matches: list[int] | None = None, source: CandidateSource = CandidateSource.TEXT
) -> Children:
    """Candidates by chance, and how many tokens matched where one followed in a source, always and twice."""
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array([chances], dtype=np.float64)).astype(np.float32)
    tokens = np.arange(len(chances), dtype=np.int32)[None]
    if matches is None:
        return Children(tokens, logprobs)
    evidence = np.full((1, len(chances), len(CandidateSource)), NOTHING, dtype=np.int8)
    strong = int(recycled_classes(np.array(0.95, dtype=np.float32), RecycledFrom.TOKEN))
    evidence[0, :, source] = [
        OTHERS
        if not match
        else strong
        if source is CandidateSource.RECYCLED
        else occurrence_class(match, 2, 2)
        for match in matches
    ]
    return Children(tokens, logprobs, evidence)


def _learn(chances: CalibratedAcceptance, row: Children, taken: int) -> None:
    chances.learn(row, after=7, token=taken)


def _chances(calibrated: CalibratedAcceptance, row: Children) -> list[float]:
    return [float(chance) for chance in np.exp(calibrated.logprobs(row)[0])]


def test_without_evidence_the_drafter_is_believed() -> None:
    row = [0.9, 0.06, 0.02, 0.01, 0.005]
    assert _chances(CalibratedAcceptance(TableStore(), "x"), _row(row)) == pytest.approx(row, rel=0.12)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.999), st.integers(0, 2), st.integers(0, 5)), max_size=60),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_likelier_candidate_never_gets_a_lower_chance(
    evidence: list[tuple[float, int, int]], rank: int, match: int
) -> None:
    calibrated = CalibratedAcceptance(TableStore(), "x")
    for chance, taken, matched in evidence:
        left = 1 - chance
        _learn(calibrated, _row([chance, left * 0.7, left * 0.2], [matched, 0, 1]), taken - 1)
    assert (np.diff(calibrated.map, axis=-1) > 0).all()
    asked = [0.0005, 0.01, 0.2, 0.201, 0.5, 0.9, 0.999]
    answers = []
    for chance in asked:
        row, matches = [1e-9] * 5, [0] * 5
        row[rank], matches[rank] = chance, match
        answers.append(_chances(calibrated, _row(row, matches))[rank])
    assert answers == sorted(answers)
    assert all(0 < answer <= 1 for answer in answers)


@settings(max_examples=4)
@given(st.floats(0.4, 2.2), st.floats(-1.5, 1.0), st.integers(0, 2**32 - 1))
def test_converges_to_the_truth(slope: float, shift: float, seed: int) -> None:
    """The target takes the drafter's first candidate with some other chance than the drafter says."""
    rng = np.random.default_rng(seed)
    calibrated = CalibratedAcceptance(TableStore(), "x")

    def truth(chance: float) -> float:
        return float(1 / (1 + np.exp(-(slope * np.log(chance / (1 - chance)) + shift))))

    for _ in range(3000):
        chance = float(rng.uniform(0.05, 0.98))
        taken = 0 if rng.random() < truth(chance) else -1
        _learn(calibrated, _row([chance, (1 - chance) / 2]), taken)
    for chance in (0.15, 0.5, 0.85):
        learned = _chances(calibrated, _row([chance, (1 - chance) / 2]))[0]
        assert learned == pytest.approx(truth(chance), abs=0.09)


def test_what_the_text_proposes_has_chances_of_its_own() -> None:
    calibrated = CalibratedAcceptance(TableStore(), "x")
    alone = _chances(calibrated, _row([0, 0, 0], [1, 6, 0]))
    assert alone[0] < 0.3 < 0.7 < alone[1]
    assert alone[2] == 0
    doubted = _chances(calibrated, _row([0.9, 0.1, 0], [0, 0, 6]))
    assert doubted[2] < 0.1
    agreed = _chances(calibrated, _row([0.6, 0.1], [6, 0]))
    assert agreed[0] > _chances(calibrated, _row([0.6, 0.1]))[0] > agreed[1]


@pytest.mark.parametrize("source", list(CandidateSource))
@pytest.mark.parametrize("listed", [0.0, 0.5])
def test_a_source_that_is_never_right_soon_costs_nothing(source: CandidateSource, listed: float) -> None:
    calibrated = CalibratedAcceptance(TableStore(), "x")
    row = _row([listed, 0], [0, 6], source)
    for _ in range(300):
        _learn(calibrated, row, 0)
    assert _chances(calibrated, row)[1] < 0.05, "it is not worth a row of a pass"
    for other in set(CandidateSource) - {source}:
        of_other = _row([listed, 0], [0, 6], other)
        before = _chances(CalibratedAcceptance(TableStore(), "x"), of_other)[1]
        assert _chances(calibrated, of_other)[1] == before, "the others are believed as before"


@pytest.mark.slow
@settings(max_examples=6)
@given(st.sampled_from(list(CandidateSource)), st.floats(0.05, 0.95), st.integers(0, 2**32 - 1))
def test_a_sources_chance_is_learned(source: CandidateSource, truth: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    calibrated = CalibratedAcceptance(TableStore(), "x")
    row = _row([0], [3], source)
    for _ in range(2500):
        _learn(calibrated, row, 0 if rng.random() < truth else -1)
    assert _chances(calibrated, row)[0] == pytest.approx(truth, abs=0.09)


def test_what_a_source_is_worth_is_kept(tmp_path: Path) -> None:
    store = TableFile(tmp_path / "pair.npz")
    first = CalibratedAcceptance(store, "greedy")
    row = _row([0, 0], [6, 3])
    for _ in range(100):
        _learn(first, row, 1)
    first.flush()
    store.save()
    again = CalibratedAcceptance(TableFile(tmp_path / "pair.npz"), "greedy")
    assert _chances(again, row) == pytest.approx(_chances(first, row), abs=1e-3)


def test_what_was_learned_is_there_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pair.npz"
    store = TableFile(path)
    first = CalibratedAcceptance(store, "greedy")
    row = _row([0.5, 0.3])
    before = _chances(first, row)
    for _ in range(300):
        _learn(first, row, 1)
    learned = _chances(first, row)
    assert learned[0] < 0.2 < 0.8 < learned[1]
    first.flush()
    store.save()
    assert [entry.name for entry in path.parent.iterdir()] == ["pair.npz"]
    again = CalibratedAcceptance(TableFile(path), "greedy")
    assert _chances(again, row) == pytest.approx(learned, abs=1e-3)
    assert again.calibration.nats == pytest.approx(first.calibration.nats, abs=1e-3)
    assert _chances(CalibratedAcceptance(TableFile(path), "sampled"), row) == before, "each has its own"


def test_a_store_keeps_what_others_put_there(tmp_path: Path) -> None:
    path = tmp_path / "pair.npz"
    for name in ("greedy", "sampled"):
        store = TableFile(path)
        one = CalibratedAcceptance(store, name)
        for _ in range(50):
            _learn(one, _row([0.5]), -1)
        one.flush()
        store.save()
    for name in ("greedy", "sampled"):
        assert _chances(CalibratedAcceptance(TableFile(path), name), _row([0.5]))[0] < 0.3


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from([(7,), (3, 5), (2, 6, 5)]))
def test_tables_are_kept_whatever_is_in_them(seed: int, share: float, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    table = (rng.normal(size=shape) * (rng.random(shape) < share)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.npz"
        store = TableFile(path)
        store.put("a", table)
        store.put("b", np.ones(2))
        store.save()
        again = TableFile(path)
    kept, other = again.get("a", shape), again.get("b", (2,))
    assert kept is not None
    assert other is not None
    assert kept.tolist() == table.tolist()
    assert other.tolist() == [1, 1]
    assert again.get("a", (*shape, 1)) is None


def test_what_is_learned_of_a_pair_is_in_the_memory_budget(tmp_path: Path) -> None:
    """As much as there ever is: every cell used, read from a file and written again."""
    path = tmp_path / "pair.npz"
    for _ in range(2):
        tracemalloc.start()
        pair = DrafterCalibration(TableFile(path))
        for biases in (pair._of_token, pair._after_token):
            biases._table += 1
        policy = CalibratedAcceptance(pair._store, "greedy", pair)
        _learn(policy, _row([0.5, 0.3]), 1)
        policy.flush()
        pair._store.save()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert LEARNED_BYTES / 2 < peak <= LEARNED_BYTES


def _packed(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez(
        file, allow_pickle=True, **{name.replace("_", " "): np.array(value) for name, value in arrays.items()}
    )
    return file.getvalue()


def _with(values: object, *, version: int = 2, shape: object = (2,), cells: object = (0, 1)) -> bytes:
    """A file whose table of the disagreement is this one."""
    name = f"{version}_disagreement"
    return _packed(**{f"{name}_shape": shape, f"{name}_cells": cells, f"{name}_values": values})


_SOUND = _with([1.0, 30.0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        _SOUND[:-30],
        _SOUND[:40] + b"?" * 8 + _SOUND[48:],
        _packed(**{"2_disagreement_shape": [2]}),
        _with(["a", "b"]),
        _with([[1.0], [2.0]]),
        _with([1.0, 2.0], shape=[1 << 40]),
        _with([1.0, 2.0], shape=[-2]),
        _with([1.0, 2.0], shape=[[2]]),
        _with([1.0, 2.0], cells=[0, 9]),
        _with([1.0, 2.0], cells=[0, -9]),
        _with([1.0, 2.0], cells=[0.5, 1.5]),
        _with([np.nan, 1.0]),
        _with([-1.0, 1.0]),
        _with([1e30, 1.0]),
        _with([3.0, 9.0], version=1),
        _with([object(), object()]),
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pair.npz"
    path.write_bytes(content)
    store = TableFile(path)
    calibrated = CalibratedAcceptance(store, "x")
    row = _row([0.7, 0.2])
    assert _chances(calibrated, row) == _chances(CalibratedAcceptance(TableStore(), "x"), row)
    assert calibrated.calibration.nats == DrafterCalibration().nats
    _learn(calibrated, row, 0)
    calibrated.flush()
    store.save()
    assert TableFile(path).get("disagreement", (2,)) is not None


def test_counts_that_cannot_be_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "pair.npz"
    store = TableFile(path)
    for table in (np.full((2, 4, 15), -3.0), np.stack([np.zeros((4, 15)), np.full((4, 15), 1e6)])):
        store.put("x map", table)
        store.save()
        assert _chances(CalibratedAcceptance(TableFile(path), "x"), _row([0.5])) == pytest.approx(
            [0.5], abs=0.01
        )


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TableFile(tmp_path / "file" / "pair.npz")
    calibrated = CalibratedAcceptance(store, "x")
    _learn(calibrated, _row([0.5]), 0)
    calibrated.flush()
    store.save()


def test_pairs_have_files_of_their_own(tmp_path: Path) -> None:
    for pair in (("a", "b"), ("a", "c"), ("b", "a")):
        for secret in (b"one", b"another"):
            store = TableFile.for_pair(tmp_path, pair, secret)
            store.put("x", np.ones(1))
            store.save()
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.slow
@settings(max_examples=4)
@given(st.floats(0.1, 1.3), st.integers(0, 2**32 - 1))
def test_how_much_noise_says_is_learned(slope: float, seed: int) -> None:
    """The target takes what the text proposes more often, the more noise it adds to it."""
    rng = np.random.default_rng(seed)
    calibrated = CalibratedAcceptance(TableStore(), "x")

    def row(noise: float) -> Children:
        return replace(_row([0], [3]), noise=np.full((1, 1), noise, dtype=np.float32))

    for _ in range(4000):
        noise = float(rng.gumbel())
        chance = 1 / (1 + np.exp(-slope * (np.clip(noise, -2, 6) - 0.5772)))
        _learn(calibrated, row(noise), 0 if rng.random() < chance else -1)
    for noise in (-1.0, 0.5, 3.0):
        expected = 1 / (1 + np.exp(-slope * (noise - 0.5772)))
        assert _chances(calibrated, row(noise))[0] == pytest.approx(expected, abs=0.09)


def test_noise_does_not_count_twice_where_the_drafter_ranks_by_it() -> None:
    calibrated = CalibratedAcceptance(TableStore(), "x")
    for noise in (-1.0, 4.0):
        listed = replace(_row([0.5, 0.2], [3, 0]), noise=np.full((1, 2), noise, dtype=np.float32))
        assert _chances(calibrated, listed) == _chances(calibrated, _row([0.5, 0.2], [3, 0]))


def test_what_is_kept_has_the_same_shape_whatever_was_read(tmp_path: Path) -> None:
    """No table grows with a text or has its order: they are sums over all of them."""
    shapes = []
    for number, tokens in enumerate(([3, 1, 4, 1, 5], [9, 2, 6] * 40)):
        path = tmp_path / f"{number}.npz"
        store = TableFile(path)
        calibrated = CalibratedAcceptance(store, "greedy")
        for before, token in itertools.pairwise(tokens):
            children = replace(_row([0.5, 0.3, 0], [0, 2, 4]), noise=np.zeros((1, 3), dtype=np.float32))
            calibrated.learn(replace(children, tokens=children.tokens + token), before, token)
        calibrated.flush()
        store.save()
        with np.load(path) as file:
            shapes.append({name: tuple(file[name]) for name in file.files if name.endswith(" shape")})
    assert shapes[0] == shapes[1]
    assert {name.split(" ", 1)[1].removesuffix(" shape") for name in shapes[0]} == {
        "disagreement",
        "bias of token",
        "bias after token",
        "greedy map",
        "greedy sources",
        "greedy noise",
    }
