"""Windows of drafters: what is read of long sequences, in cells that behave like llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import Config
from edgespec.drafters.draft_sequence import WHOLE, DraftSequence, DraftWindow
from edgespec.drafters.draft_sequences import DraftSequences, Wanted
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.draft_window import draft_window, drafter_cells, usual_window
from edgespec.speculation.drafters.base import DraftMemory
from edgespec.speculation.growth import Frontier
from tests.unit.cells import N_SEQUENCES, Cells
from tests.unit.test_plan import Q4_0, model

N_VOCAB = 100


@given(st.integers(1, 50), st.integers(0, 9), st.integers(1, 400))
def test_the_middle_is_left_out_in_steps(last: int, first: int, length: int) -> None:
    window, sequence = DraftWindow(last, first), list(range(length))
    left_out = window.left_out(length)
    part = window.part(sequence, left_out)
    assert part == [*sequence[:first], *sequence[first + left_out :]]
    assert len(part) == window.length_read(length) <= window.most
    assert part[-1] == length - 1
    if length <= window.most:
        assert part == sequence
    else:
        assert len(part) > first + last // 2
        assert left_out % max(last // 2, 1) == 0
        assert left_out >= window.left_out(length - 1)


@given(st.integers(0, 10**9))
def test_a_whole_sequence_has_no_middle(length: int) -> None:
    assert WHOLE.left_out(length) == 0


class _Reading:
    """A sequence with a window, read as a drafter reads it."""

    def __init__(self, window: DraftWindow, *, can_shift: bool = True, sliding: int = 0) -> None:
        self.window = window
        self.context = Cells(can_shift=can_shift, window=sliding)
        context: Any = self.context
        self.drafted = DraftSequence(BranchingCache(SharedCells(context, ordered=False)), N_VOCAB, window)

    def follow(self, sequence: list[int]) -> None:
        self.drafted.begin(sequence)
        self.drafted.keep_accepted(None)
        self.drafted.read_pending(4)
        self.drafted.cache.append(self.drafted.pending_batch())
        self.drafted.note_pending_read()

    def branch(self, token: int) -> None:
        """Read a node below the root, as a part of a tree."""
        one = np.array([1], dtype=np.int32)
        frontier = Frontier(one, one * 0 + token, one * 0, one)
        _, batch = self.drafted.branch_batch(frontier)
        assert batch is not None
        self.drafted.cache.try_branches(batch)

    def check(self, sequence: list[int]) -> None:
        expected = self.window.part(sequence, self.window.left_out(len(sequence)))
        assert self.drafted.read == expected
        assert self.drafted.cache.length == len(expected)
        assert self.context.seen(0, len(sequence)) == expected
        cells = [cell.position for cell in self.context.cells if 0 in cell.sequences]
        assert sorted(cells) == [*range(len(expected))]
        assert self.drafted.agreement(sequence) == len(sequence)
        assert self.drafted.is_continued_by([*sequence, 5])


@pytest.mark.parametrize("can_shift", [True, False])
@given(data=st.data())
def test_whatever_becomes_of_the_sequence_the_cells_hold_its_part(
    can_shift: bool, data: st.DataObject
) -> None:
    """It grows, is rewound into its beginning, its middle and its end, and branches are tried on the way."""
    window = DraftWindow(data.draw(st.integers(1, 12)), data.draw(st.integers(0, 5)))
    sliding = data.draw(st.sampled_from([0, 1, 4, 20]))
    reading, sequence = _Reading(window, can_shift=can_shift, sliding=sliding), [1]
    for _ in range(data.draw(st.integers(1, 8))):
        kept = data.draw(st.integers(0, len(sequence)))
        sequence = sequence[: kept if data.draw(st.booleans()) else None]
        sequence = sequence + data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
        reading.follow(sequence)
        reading.check(sequence)
        if data.draw(st.booleans()):
            reading.branch(data.draw(st.integers(0, 9)))


def test_what_was_saved_before_the_window_moved_is_of_use() -> None:
    """Blocks of a store are found for the part that was read when they were written."""

    class Store:
        def __init__(self, saved: list[int]) -> None:
            self.saved = saved

        def restore(self, cache: KVCache, tokens: Sequence[int]) -> int:
            if list(tokens[: len(self.saved)]) != self.saved:
                return cache.length
            batch = TokenBatch.run(self.saved[cache.length :], cache.length, 1)
            cache.append(batch)
            return cache.length

    before, sequence = [*range(90)], [*range(95)]
    window = DraftWindow(20, first=4)
    saved = window.part(before, window.left_out(len(before)))
    assert window.left_out(len(sequence)) > window.left_out(len(before))
    reading = _Reading(window)
    reading.drafted.begin(sequence)
    reading.drafted.keep_accepted(None)
    reading.drafted.restore(Store(saved), sequence)
    assert reading.drafted.read == [*range(4), *range(84, 90)]
    assert reading.drafted.pending == [*range(90, 95)]
    reading.follow(sequence)
    reading.check(sequence)


def test_the_middle_of_a_prompt_is_never_read() -> None:
    reading = _Reading(DraftWindow(20, first=4))
    reading.follow([*range(90)] * 10)
    assert reading.context.n_read <= 24


@pytest.mark.parametrize("can_shift", [True, False])
def test_a_window_moves_without_reading_again_where_cells_can_move(can_shift: bool) -> None:
    reading, sequence = _Reading(DraftWindow(20, first=4), can_shift=can_shift), [*range(90)]
    reading.follow(sequence)
    before = reading.context.n_read
    for token in range(60):
        sequence = [*sequence, token]
        reading.follow(sequence)
        reading.check(sequence)
    read = reading.context.n_read - before
    assert read == 60 if can_shift else 60 < read <= 3 * 60


def test_candidates_are_ranked_for_their_positions_in_the_whole_sequence() -> None:
    reading = _Reading(DraftWindow(20, first=4))
    sequence = [*range(90)]
    reading.follow(sequence)
    assert reading.drafted.unread + len(reading.drafted.read) == len(sequence)


def test_a_move_that_is_interrupted_leaves_what_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _Reading(DraftWindow(20, first=4))
    sequence = [*range(90)]
    reading.follow(sequence)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reading.context, "shift", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reading.follow([*sequence, *range(5)])
    reading.drafted.cache.recover()
    reading.drafted.recover()
    assert reading.context.seen(0, 1000) == reading.drafted.read == sequence[:4]
    sequence = [*sequence, *range(6)]
    reading.follow(sequence)
    reading.check(sequence)


def test_cells_that_sequences_share_are_not_moved() -> None:
    context: Any = Cells()
    window = DraftWindow(20, first=4)
    known = DraftSequences(context, lambda cache: DraftSequence(cache, N_VOCAB, window), window)
    sequences = [[*range(50)], [*range(49), 7]]
    for _ in range(40):
        found = known.continued([Wanted(sequence) for sequence in sequences])
        for drafted in found:
            drafted.read_pending(4)
            batch: TokenBatch = drafted.pending_batch()
            drafted.cache.append(batch)
            drafted.note_pending_read()
        for drafted, sequence in zip(found, sequences, strict=True):
            expected = window.part(sequence, window.left_out(len(sequence)))
            cache = drafted.cache
            assert isinstance(cache, BranchingCache)
            assert context.seen(cache.ids[0], len(sequence)) == drafted.read == expected
        sequences = [[*sequence, number] for number, sequence in enumerate(sequences)]
    assert len(known) == 2


def test_a_sequence_shares_the_part_that_begins_alike() -> None:
    context: Any = Cells()
    window = DraftWindow(20, first=4)
    known = DraftSequences(context, lambda cache: DraftSequence(cache, N_VOCAB, window), window)
    first, longer = [*range(50)], [*range(46), *range(30)]
    for sequences in [[first], [first, [*first[:48], 3, 3]], [first, [*first[:48], 3, 3], longer]]:
        before = context.n_read
        for drafted in known.continued([Wanted(sequence) for sequence in sequences]):
            drafted.read_pending(4)
            drafted.cache.append(drafted.pending_batch())
            drafted.note_pending_read()
        new = context.n_read - before
    # Another part of the third is read, of which it has only the first tokens in common with the others.
    assert new == 2 + window.length_read(len(longer)) - window.first


def test_the_window_is_the_one_that_is_asked_for() -> None:
    drafter = model(4, 512, Q4_0)
    for asked in (1, 100, 9999):
        assert draft_window(Config.of(draft_window=asked), drafter) == DraftWindow(asked)
    assert draft_window(Config.of(draft_window=0), drafter) == WHOLE
    auto = draft_window(Config.of(draft_window="auto"), drafter)
    assert auto == draft_window(Config(), drafter) == DraftWindow(usual_window(drafter))


def test_larger_models_read_more() -> None:
    """Attention adds about a third to what the weights take, however many layers there are."""
    windows = [usual_window(model(layers, width, Q4_0)) for width in (2048, 4096, 8192) for layers in (8, 32)]
    assert windows == sorted(windows)
    assert windows[-1] > windows[0]
    # A layer has 16 width² weights, and a cell takes 2 width products with it: 8 width are as much.
    for window, width in zip(windows[1::2], (2048, 4096, 8192), strict=True):
        assert 8 * width / 3 / 1.5 < window < 8 * width / 3 * 1.5
    assert usual_window(model(1, 256, Q4_0)) == 1024


def test_experts_count_as_far_as_rows_use_them() -> None:
    some, many = model(8, 4096, Q4_0, experts=8), model(8, 4096, Q4_0, experts=64)
    assert usual_window(some) == usual_window(many)


def test_a_drafter_has_cells_for_a_few_windows_or_for_the_context() -> None:
    drafter = model(4, 512, Q4_0)
    whole = Config.of(draft_window=0, context=100_000)
    assert drafter_cells(whole, drafter) > 100_000
    windowed = drafter_cells(Config.of(draft_window=1000, context=100_000), drafter)
    assert 4 * 1064 < windowed < 6000
    short = Config.of(context=300)
    assert drafter_cells(short, drafter) == drafter_cells(short.with_(draft_window=0), drafter)


def test_a_running_state_reads_everything() -> None:
    (header,) = model(4, 512, Q4_0).headers
    metadata = {**header.metadata, "llama.ssm.state_size": 16}
    hybrid = ModelFiles((replace(header, metadata=metadata),))
    assert draft_window(Config.of(draft_window=100), hybrid) == WHOLE


def test_a_sequence_keeps_its_part_of_the_cache_among_others_that_are_alike() -> None:
    context: Any = Cells()
    known = DraftSequences(context, lambda cache: DraftSequence(cache, N_VOCAB))
    memories = [DraftMemory(), DraftMemory()]
    text = [*range(30)]
    parts = known.continued([Wanted(text, memory=memory) for memory in memories])
    for part in parts:
        part.read_pending(1)
    assert len(known) == 2
    for _ in range(3):
        parts, memories = parts[::-1], memories[::-1]
        text = [*text, 7]
        assert known.continued([Wanted(text, memory=memory) for memory in memories]) == parts
    (other,) = known.continued([Wanted([*range(40, 60)], memory=memories[0])])
    assert memories[0].state is other, "what was read of another text is of no use"


def test_new_sequences_take_the_room_of_all_that_others_had() -> None:
    context: Any = Cells()
    context.n_cells = 90
    known = DraftSequences(context, lambda cache: DraftSequence(cache, N_VOCAB))
    (long,) = known.continued([Wanted([*range(80)])])
    long.read_pending(1)
    parts = known.continued([Wanted([*range(80, 90)]), Wanted([*range(90, 99)])])
    for part in parts:
        part.read_pending(1)
    assert [len(part.read) for part in parts] == [9, 8]
    assert set(known) == set(parts)
    known.recover()


def test_sequence_ids_are_left_to_new_sequences_and_to_branches() -> None:
    context: Any = Cells()
    known = DraftSequences(context, lambda cache: DraftSequence(cache, N_VOCAB))
    for first in range(0, 12 * N_SEQUENCES, 12):
        parts = known.continued([Wanted([*range(first + n, first + n + 5)]) for n in (0, 6)])
        for part in parts:
            part.read_pending(1)
            assert part.cache.max_paths > 1
    parts[1].cache.open(parts[1].cache.max_paths)  # branches of the last tree have all others
    assert known.with_room([1] * (N_SEQUENCES + 1), 1) == [*range(N_SEQUENCES)]
