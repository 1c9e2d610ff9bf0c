"""Prefill chunks of prompts, and what is remembered of trials."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.files.small_json import files_about
from edgespec.llama.prefill_chunks import LENGTHS, PrefillChunks, outcomes_path
from edgespec.llama.row_rule import RowRule, RowRuleStore

RULE = RowRule(4, 8)


def cut(pieces: PrefillChunks, missing: int) -> list[tuple[int, int]]:
    """The pieces of a prompt, where every length that is tried turns out to be exact."""
    found = []
    while missing:
        found.append(pieces.next(missing))
        missing -= found[-1][0]
        if not pieces.is_proven(found[-1][1]):
            pieces.found(found[-1][1], same=True)
    return found


@given(st.integers(1, 9000), st.sets(st.sampled_from(LENGTHS)), st.sampled_from([0, 60, 96, 200, 512, 4096]))
def test_every_token_is_read_once_in_rows_that_are_allowed(missing: int, failed: set[int], most: int) -> None:
    pieces = PrefillChunks(RULE, most)
    for rows in failed:
        pieces.found(rows, same=False)
    found = cut(pieces, missing)
    assert sum(tokens for tokens, _ in found) == missing
    for tokens, rows in found:
        assert 0 < tokens <= rows
        if rows > RULE.maximum:
            assert rows <= most
            assert rows in LENGTHS
            assert rows not in failed
            assert tokens >= 0.75 * rows
        else:
            assert rows == RULE.padded(tokens)


def test_a_long_prompt_takes_a_fraction_of_the_passes() -> None:
    pieces = PrefillChunks(RULE, 4096)
    cut(pieces, 9000)
    assert len(cut(pieces, 8192)) == 2
    pieces = PrefillChunks(RULE, 512)
    cut(pieces, 2048)
    assert len(cut(pieces, 2048)) == 4
    assert len(cut(PrefillChunks(RULE, 60), 2048)) == 35


def test_a_length_is_tried_after_one_that_is_not_much_shorter() -> None:
    """A trial reads the piece twice: in the longest pieces that are proven, and as a whole."""
    pieces = PrefillChunks(RULE, 4096)
    lengths = [rows for _, rows in cut(pieces, 20_000)]
    assert lengths == [192, 768, 3072, 4096, 4096, 4096, *lengths[6:]]
    for rows, longer in zip([RULE.maximum, *lengths], lengths[:3], strict=False):
        assert longer <= 4 * rows


@given(st.integers(1, 4095), st.integers(0, 4608))
def test_padding_takes_no_more_cells_than_there_are(missing: int, room: int) -> None:
    pieces = PrefillChunks(RULE, 4096)
    for rows in LENGTHS:
        pieces.found(rows, same=True)
    tokens, rows = pieces.next(missing, room)
    assert tokens <= rows <= max(room, RULE.maximum)
    assert pieces.next(missing, 4096) == pieces.next(missing)


@given(st.integers(1, 9000), st.sets(st.sampled_from(LENGTHS)), st.integers(0, 5000))
def test_passes_that_texts_share_have_proven_rows_alone(wanted: int, proven: set[int], most: int) -> None:
    pieces = PrefillChunks(RULE, most)
    for rows in proven:
        pieces.found(rows, same=True)
    rows = pieces.proven(wanted)
    assert 0 < rows <= wanted
    assert pieces.is_proven(rows)
    if rows > RULE.maximum:
        assert pieces.padded(rows) == rows <= most, "rows that only fill a pass would want logits"


def test_lengths_that_the_rule_would_pad_are_not_taken() -> None:
    assert PrefillChunks(RowRule(5, 5), 512).longest == RULE.maximum


def test_outcomes_are_remembered_and_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    file = tmp_path / "pieces.json"
    pieces = PrefillChunks(RULE, 512, file)
    assert pieces.longest == 512
    assert not pieces.is_proven(512)
    pieces.found(512, same=False)
    pieces.found(384, same=True)
    again = PrefillChunks(RULE, 512, file)
    assert (again.longest, again.is_proven(384), again.is_proven(256)) == (384, True, False)
    for text in ("", "[]", '{"x": 1}'):
        file.write_text(text)
        assert PrefillChunks(RULE, 512, file).longest == 512


@pytest.mark.parametrize("rule", [RowRule(1, 2), RowRule(4, 8), RowRule(8, 8, 56)])
def test_of_row_counts_with_one_size_the_largest_is_tried(rule: RowRule) -> None:
    from edgespec.llama.row_rule import distinct_counts

    counts = (1, 2, 3, 5, 8, 9, 31, 32, 59)
    tried = distinct_counts(rule, counts)
    sizes = [rule.padded(rows) for rows in tried]
    assert sizes == sorted({rule.padded(rows) for rows in counts})
    for rows in counts:
        assert tried[sizes.index(rule.padded(rows))] >= rows


def test_a_rule_found_with_layers_on_a_gpu_is_not_used_without(tmp_path: Path) -> None:
    from edgespec.llama.row_rule import THOROUGH

    store = RowRuleStore(tmp_path)
    held = ["packed gpu_layers=0", "packed gpu_layers=4", "plain gpu_layers=0"]
    assert len({store.path("model", how, THOROUGH) for how in held}) == 3


def test_everything_remembered_of_a_model_is_found_when_it_is_removed(tmp_path: Path) -> None:
    from edgespec.llama.row_rule import SPARING

    store = RowRuleStore(tmp_path)
    mine = [
        store.path("a" * 64, "packed gpu_layers=7", SPARING),
        outcomes_path(tmp_path, "a" * 64, {"x": "1"}),
    ]
    other = store.path("b" * 64, "packed gpu_layers=7", SPARING)
    for path in (*mine, other):
        path.write_text("{}")
    assert files_about(tmp_path, "a" * 64) == sorted(mine)


@pytest.mark.parametrize("rows", [1, 60])
def test_short_pieces_need_no_proof(rows: int) -> None:
    assert PrefillChunks(RULE, 512).is_proven(rows)
