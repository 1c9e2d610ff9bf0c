"""The pool of experts: every byte where the kernels look for it, whatever was given up for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.files.positioned import BLOCK
from edgespec.llama.runtime.abort import DecodeAborted
from edgespec.offload.experts.pool import ExpertPool, FadingCounts
from edgespec.offload.layout import EXPERT_PIECE_BYTES, ExpertRun, Store, StoredExperts
from edgespec.offload.store_reader import StoreReader
from tests.waiting import PATIENCE_S

N_EXPERTS, LAYERS = 6, 3
# Two stacks a layer. The first one's experts begin equally far behind a block, so that they are read to their
# places; the second one's are moved there.
EVEN, ODD = 2 * BLOCK, BLOCK + 300
LEAD = 96
LAYER_BYTES = N_EXPERTS * (EVEN + ODD)


def never() -> bool:
    return False


def shares(n: int) -> list[float]:
    return [1.0] * n


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(LEAD + LAYERS * LAYER_BYTES)


@pytest.fixture
def store(tmp_path: Path, content: bytes) -> Store:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    experts = {}
    for layer in range(LAYERS):
        first = LEAD + layer * LAYER_BYTES
        second = first + N_EXPERTS * EVEN
        lead = first % BLOCK
        end = lead + EVEN + BLOCK - (lead + EVEN) % BLOCK
        runs = (ExpertRun(0, first, EVEN, EVEN, lead), ExpertRun(0, second, ODD, ODD, end))
        places = {f"even.{layer}": lead, f"odd.{layer}": end}
        experts[layer] = StoredExperts(layer, N_EXPERTS, runs, places, end + 3 * BLOCK)
    return Store((path,), {}, {}, packed=False, experts=experts)


@pytest.fixture
def reader(store: Store) -> Iterator[StoreReader]:
    reader = StoreReader(store)
    yield reader
    reader.close()


@pytest.fixture
def pool(reader: StoreReader) -> Iterator[ExpertPool]:
    pool = ExpertPool(reader, range(LAYERS), n_slots=N_EXPERTS + 2, n_threads=3)
    yield pool
    pool.close()


def acquire(
    pool: ExpertPool, layer: int, experts: Sequence[int], stop: Callable[[], bool] = never
) -> list[int]:
    pool.request(layer, experts, shares(len(experts)))
    return pool.acquire(stop)


def check(pool: ExpertPool, store: Store, content: bytes, layer: int, experts: Sequence[int]) -> None:
    """Take some experts, and compare every byte of theirs."""
    slots = acquire(pool, layer, experts)
    assert len(set(slots)) == len(experts)
    stored = store.experts[layer]
    for expert, slot in zip(experts, slots, strict=True):
        for run in stored.runs:
            at = run.offset + expert * run.distance
            held = ctypes.string_at(pool.address + slot * pool.slots.slot_bytes + run.at, run.n_bytes)
            assert held == content[at : at + run.n_bytes]


@given(
    offset=st.integers(0, 3 * BLOCK),
    n_bytes=st.integers(1, 2 * EXPERT_PIECE_BYTES + 5 * BLOCK),
    expert=st.integers(0, 5),
)
def test_the_reads_of_an_expert_cover_it_once_and_read_whole_blocks(
    offset: int, n_bytes: int, expert: int
) -> None:
    place = offset % BLOCK
    run = ExpertRun(0, offset, n_bytes, n_bytes, at=place)
    stored = StoredExperts(0, 6, (run,), {}, place + n_bytes + BLOCK)
    begin, at = offset + expert * n_bytes, place
    for read in stored.reads(expert):
        piece = read.piece
        assert piece.offset % BLOCK == piece.n_bytes % BLOCK == 0
        assert piece.n_bytes <= EXPERT_PIECE_BYTES
        assert (piece.offset + read.first, piece.at + read.first) == (begin + at - place, at)
        assert read.direct == (begin % BLOCK == place)
        if read.direct:
            assert piece.at >= 0
            assert piece.at + piece.n_bytes <= -(-(place + n_bytes) // BLOCK) * BLOCK
        at += read.last - read.first
    assert at == place + n_bytes


def test_every_expert_lies_where_the_kernels_look_for_it(
    pool: ExpertPool, store: Store, content: bytes
) -> None:
    assert {read.direct for read in store.experts[0].reads(1)} == {True, False}
    for layer in (0, 1, 2, 0):
        pool.next_pass()
        check(pool, store, content, layer, range(N_EXPERTS))
    check(pool, store, content, 0, [4, 1])
    assert pool.use.hits >= 2
    assert pool.slots.waited_s > 0
    assert pool.slots.meter.n_bytes >= pool.use.misses * (EVEN + ODD)


@settings(max_examples=25, deadline=None)
@given(
    n_slots=st.integers(N_EXPERTS, LAYERS * N_EXPERTS + 3),
    passes=st.lists(
        st.lists(st.sets(st.integers(0, N_EXPERTS - 1), min_size=1), min_size=LAYERS, max_size=LAYERS),
        min_size=1,
        max_size=12,
    ),
)
def test_misses_are_those_of_the_policy_and_nothing_is_read_twice(
    n_slots: int, passes: list[list[set[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("pool") / "records.bin"
    content = np.random.default_rng(1).bytes(LAYERS * N_EXPERTS * BLOCK)
    path.write_bytes(content)
    experts = {
        layer: StoredExperts(
            layer, N_EXPERTS, (ExpertRun(0, layer * N_EXPERTS * BLOCK, BLOCK, BLOCK, at=0),), {}, BLOCK
        )
        for layer in range(LAYERS)
    }
    store = Store((path,), {}, {}, packed=False, experts=experts)
    reader = StoreReader(store)
    pool = ExpertPool(reader, range(LAYERS), n_slots=n_slots, n_threads=2)
    counts, held, misses = FadingCounts(LAYERS * N_EXPERTS), set(), 0
    for chosen in passes:
        pool.next_pass()
        counts.next_pass()
        for layer, needed in enumerate(chosen):
            numbers = {layer * N_EXPERTS + expert for expert in needed}
            counts.add(sorted(numbers), shares(len(numbers)))
            absent = numbers - held
            misses += len(absent)
            least = sorted(held - numbers, key=lambda number: counts.worth[number])
            given_up = max(len(held) + len(absent) - pool.n_slots, 0)
            # Of experts that are worth the same, either may go: then only how many are missed is known.
            if 0 < given_up < len(least):
                last, kept = (counts.worth[least[at]] for at in (given_up - 1, given_up))
                if last == kept:
                    pool.close()
                    reader.close()
                    return
            held = (held - set(least[:given_up])) | numbers
            check(pool, store, content, layer, sorted(needed))
            assert pool.use.misses == misses
    assert pool.use.read_bytes == misses * BLOCK == pool.slots.meter.n_bytes
    pool.close()
    reader.close()


def test_what_was_used_more_stays(pool: ExpertPool, store: Store, content: bytes) -> None:
    for _ in range(3):
        pool.next_pass()
        check(pool, store, content, 0, [0, 1])
    for layer in (1, 2, 1, 2):  # fills the other slots over and over
        pool.next_pass()
        check(pool, store, content, layer, range(N_EXPERTS))
    misses = pool.use.misses
    check(pool, store, content, 0, [0, 1])
    assert pool.use.misses == misses


def test_reading_ahead_brings_a_layer_and_counts_as_a_miss_once(
    pool: ExpertPool, store: Store, content: bytes
) -> None:
    check(pool, store, content, 0, [0, 1])
    pool.read_ahead(1)
    check(pool, store, content, 1, range(N_EXPERTS))
    check(pool, store, content, 1, [2, 3])
    assert (pool.use.hits, pool.use.misses) == (2, 2 + N_EXPERTS)
    pool.read_ahead(2)  # only two slots are neither free nor needed by the layer before
    check(pool, store, content, 2, range(N_EXPERTS))


class Gate:
    """Reads that begin, and end only when they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_continue = threading.Event(), threading.Event()
        read = FileReader.read_into

        def waiting(reader: FileReader, memories: Sequence[memoryview], offset: int) -> int:
            self.begun.set()
            assert self.may_continue.wait(PATIENCE_S)
            return read(reader, memories, offset)

        monkeypatch.setattr(FileReader, "read_into", waiting)


def test_neighbours_in_the_file_are_read_at_once_where_many_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_experts, n_bytes, sizes = 64, 3 * BLOCK, []
    content = np.random.default_rng(1).bytes(n_experts * n_bytes)
    path = tmp_path / "model.pack"
    path.write_bytes(content)
    stored = StoredExperts(0, n_experts, (ExpertRun(0, 0, n_bytes, n_bytes, 0),), {"experts": 0}, n_bytes)
    read = FileReader.read_into

    def counted(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        sizes.append(len(memories))
        return read(self, memories, offset)

    monkeypatch.setattr(FileReader, "read_into", counted)
    store = Store((path,), {}, {}, packed=False, experts={0: stored})
    with (
        closing(StoreReader(store)) as reader,
        closing(ExpertPool(reader, [0], n_slots=n_experts, n_threads=2)) as pool,
    ):
        check(pool, store, content, 0, range(n_experts))
    assert sum(sizes) == n_experts
    assert max(sizes) > 1


def test_a_failed_read_is_raised_where_its_expert_is_needed_and_tried_again(
    pool: ExpertPool, store: Store, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failing = FileReader.read_into, [True]

    def flaky(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        if failing[0]:
            raise StreamError("Reading failed: Input/output error.")
        return read(self, memories, offset)

    monkeypatch.setattr(FileReader, "read_into", flaky)
    with pytest.raises(StreamError, match="Input/output error"):
        acquire(pool, 1, (0, 3))
    failing[0] = False
    check(pool, store, content, 1, [0, 3])


def test_a_wait_ends_when_it_is_asked_to_and_what_was_begun_is_finished(
    pool: ExpertPool, store: Store, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_continue = FileReader.read_into, threading.Event()

    def hanging(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        assert may_continue.wait(PATIENCE_S)
        return read(self, memories, offset)

    monkeypatch.setattr(FileReader, "read_into", hanging)
    with pytest.raises(DecodeAborted):
        acquire(pool, 2, (1, 5), lambda: True)
    may_continue.set()
    misses = pool.use.misses
    check(pool, store, content, 2, [1, 5])
    assert pool.use.misses == misses


def test_counts_fade_by_half_in_a_half_life_however_long_it_runs() -> None:
    counts = FadingCounts(2, half_life=4)
    counts.next_pass()
    counts.add([0], shares(1))
    for _ in range(4):
        counts.next_pass()
    counts.add([1], [0.5])
    assert counts.worth[0] == pytest.approx(counts.worth[1])
    for _ in range(20_000):  # far more than numbers could grow for
        counts.next_pass()
        counts.add([0], shares(1))
    assert np.isfinite(counts.worth).all()
    assert counts.worth[0] > 1e9 * counts.worth[1]
