"""A pack divided among folders: every byte in one of them, and as many in each as its disk is fast."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from edgespec.llama.runtime.backend import start_backend
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import Store
from edgespec.offload.packing.build import build_pack
from edgespec.offload.packing.division import Divider, PackFolders, divide, named_folders
from edgespec.offload.packing.index import part_path, remove_pack
from edgespec.offload.packing.pack import PartGone, open_pack, piece_sizes

LAYERS = 3
RATES = st.lists(st.floats(1e6, 1e10), min_size=1, max_size=4)
SIZES = st.lists(st.integers(1, 1024).map(lambda blocks: blocks * 4096), min_size=1, max_size=200)


@given(SIZES, RATES)
def test_no_folder_has_more_than_its_share_and_a_piece(sizes: list[int], rates: list[float]) -> None:
    divider, total, largest = Divider(rates), 0, 0
    for size in sizes:
        divider.next(size)
        total, largest = total + size, max(largest, size)
        assert sum(divider.n_bytes) == total
        for has, rate in zip(divider.n_bytes, rates, strict=True):
            assert has <= rate / sum(rates) * total + largest + 1


@given(SIZES, st.tuples(st.floats(1e6, 1e10), st.floats(1e6, 1e10)))
def test_of_two_folders_neither_is_a_piece_off(sizes: list[int], rates: tuple[float, float]) -> None:
    for has, rate in zip(divide(sizes, rates), rates, strict=True):
        assert abs(has - rate / sum(rates) * sum(sizes)) <= max(sizes) + 1


@pytest.fixture
def files(q4_drafter_path: Path) -> ModelFiles:
    start_backend()
    return ModelFiles.of(read_header(q4_drafter_path))


def build(files: ModelFiles, tmp_path: Path) -> tuple[Path, Store, tuple[Path, ...]]:
    folders = (tmp_path / "fast", tmp_path / "slow")
    for folder in folders:
        folder.mkdir(exist_ok=True)
    path = tmp_path / "packs" / "model.pack"
    rates = dict(zip(folders, (2e9, 1e9), strict=True))
    return path, build_pack(path, files, files.layers()[:LAYERS], rates=rates), folders


def test_a_divided_pack_holds_what_a_whole_one_does(files: ModelFiles, tmp_path: Path) -> None:
    path, store, folders = build(files, tmp_path)
    whole = build_pack(tmp_path / "whole.pack", files, files.layers()[:LAYERS])
    assert open_pack(path, files) == store
    assert store.paths == tuple(part_path(path, folder) for folder in folders)
    assert (store.spread, store.n_disks, store.kernels) == (True, 2, whole.kernels)
    contents = [part.read_bytes() for part in store.paths]
    places: list[tuple[int, int, int]] = []
    for index, layer in store.layers.items():
        assert layer.places == whole.layers[index].places
        for piece, same in zip(layer.pieces, whole.layers[index].pieces, strict=True):
            assert (piece.at, piece.n_bytes, piece.checksum) == (same.at, same.n_bytes, same.checksum)
            content = contents[piece.file][piece.offset : piece.offset + piece.n_bytes]
            assert xxhash.xxh3_64_intdigest(content) == piece.checksum
            places.append((piece.file, piece.offset, piece.n_bytes))
    for number, content in enumerate(contents):  # from the first block to the end, without gaps
        end = 4096
        for _, offset, n_bytes in sorted(place for place in places if place[0] == number):
            assert offset == end
            end += n_bytes
        assert end == len(content)
    sizes = [size for _, _, size in places]
    assert sizes == [*piece_sizes(files.layers()[:LAYERS])]


def test_a_part_that_is_gone_short_or_of_another_pack_is_noticed(files: ModelFiles, tmp_path: Path) -> None:
    path, store, _ = build(files, tmp_path)
    part = store.paths[1]
    content = part.read_bytes()
    for other in (
        content[:-1],
        bytes([content[0] ^ 1]) + content[1:],
        content[:8] + bytes(16) + content[24:],
    ):
        part.write_bytes(other)
        with pytest.raises(PartGone, match=r"slow.*damaged"):
            open_pack(path, files)
    part.unlink()
    with pytest.raises(PartGone, match=r"slow.*cannot be read"):
        open_pack(path, files)
    part.write_bytes(content)
    assert open_pack(path, files) == store


def test_packed_layers_stay_where_they_belong(files: ModelFiles, tmp_path: Path) -> None:
    _, store, (fast, slow) = build(files, tmp_path)
    whole = build_pack(tmp_path / "whole.pack", files, files.layers()[:LAYERS])
    other = tmp_path / "other"
    assert PackFolders().keeps(store, ())  # nobody named any
    assert PackFolders((slow, fast)).keeps(store, (fast, slow))
    assert PackFolders((slow, fast, other)).keeps(store, (fast, slow))  # the other is on a disk of these
    assert PackFolders((slow, fast)).keeps(store, (fast,))  # the slow one cannot be written to now
    assert not PackFolders((slow, fast, other)).keeps(store, (fast, slow, other))
    assert not PackFolders((fast,)).keeps(store, (fast,))
    assert not PackFolders((fast,)).keeps(whole, (fast,))
    assert PackFolders((fast,)).keeps(whole, ())


def test_folders_that_cannot_hold_a_part_are_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    good, same, missing = tmp_path / "good", tmp_path / "same", tmp_path / "missing" / "packs"
    notes: list[str] = []
    folders = PackFolders((good, file, good, missing, same))
    assert folders.usable(notes, make=False) == (good,)
    assert not good.exists()
    notes.clear()
    assert folders.usable(notes) == (good,)
    beneath, absent, shared = notes  # the first two end in the system's words
    assert beneath.startswith(f"'{file}' cannot hold packed layers: ")
    assert absent.startswith(f"'{missing}' cannot hold packed layers: ")
    assert shared == f"'{same}' is on the same disk as '{good}', so no layers are packed there."
    assert list(good.iterdir()) == []


def test_an_empty_name_is_no_folder(tmp_path: Path) -> None:
    assert named_folders(["", str(tmp_path)]).folders == (tmp_path,)


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0,
    reason="root can write to any folder, and modes are of POSIX",
)
def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    folder, notes = tmp_path / "locked", list[str]()
    folder.mkdir(mode=0o500)
    assert PackFolders((folder,)).usable(notes) == ()
    assert notes == [f"'{folder}' cannot hold packed layers: Permission denied."]


def test_a_pack_is_removed_with_its_parts(files: ModelFiles, tmp_path: Path) -> None:
    path, store, _ = build(files, tmp_path)
    remove_pack(path)
    assert not any(file.exists() for file in (path, *store.paths))


def test_experts_have_a_place_for_each_read() -> None:
    from edgespec.offload.layout import EXPERT_PIECE_BYTES, ExpertRun, StoredExperts

    size = EXPERT_PIECE_BYTES + 4096
    run = ExpertRun(0, 4096, size, size, at=0)
    plain = StoredExperts(0, 1, (run,), {}, size, ((7, 8),))
    spread = replace(plain, homes=(((1, 4096), (0, 8192)),))
    reads = [(read.piece.file, read.piece.offset, read.piece.at) for read in spread.reads(0)]
    assert reads == [(1, 4096, 0), (0, 8192, EXPERT_PIECE_BYTES)]
    assert [read.piece.checksum for read in spread.reads(0)] == [7, 8]
