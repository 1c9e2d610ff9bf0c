"""Streamed tensors, and where they are read from, in files of one part and of several."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.files.positioned import BLOCK
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, pattern_of
from edgespec.offload.layout import Piece, StoredLayer, plain_store, round_up
from tests.tiny import finish

ROWS, COLUMNS = 96, 256  # 26 KB as Q8_0: not small


def write_model(path: Path, layers: int, **options: int) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(layers)
    rng = np.random.default_rng(0)

    def matrix() -> np.ndarray:
        return gguf.quants.quantize(
            rng.standard_normal((ROWS, COLUMNS), np.float32), gguf.GGMLQuantizationType.Q8_0
        )

    writer.add_tensor("token_embd.weight", matrix(), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for layer in range(layers):
        for kind in ("attn_q", "ffn_up", "ssm_in"):
            writer.add_tensor(
                f"blk.{layer}.{kind}.weight", matrix(), raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(COLUMNS, np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.bias", np.ones(COLUMNS, np.float32))
        writer.add_tensor(f"blk.{layer}.ssm_conv1d.weight", np.ones((8, 4), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(COLUMNS, np.float32))
    finish(writer)


def stored_bytes(files: ModelFiles, layer: StoredLayer) -> bytearray:
    """Bytes of a slot after the layer is read."""
    slot = bytearray(layer.n_bytes)
    for piece in layer.pieces:
        assert piece.offset % BLOCK == piece.at % BLOCK == piece.n_bytes % BLOCK == 0
        with files.paths[piece.file].open("rb") as file:
            file.seek(piece.offset)
            data = file.read(piece.n_bytes)
        slot[piece.at : piece.at + len(data)] = data
    return slot


def check_store(files: ModelFiles, expected_layers: int) -> None:
    layers = files.layers()
    assert [layer.index for layer in layers] == list(range(expected_layers))
    store = plain_store(files, layers)
    readers = [gguf.GGUFReader(path) for path in files.paths]
    content = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    for layer in layers:
        slot = stored_bytes(files, store.layers[layer.index])
        for tensor in layer.tensors:
            at = store.layers[layer.index].places[tensor.name]
            data = np.ascontiguousarray(content[tensor.name].data).tobytes()
            assert bytes(slot[at : at + tensor.n_bytes]) == data


def test_matrices_of_layers_stream_and_all_else_stays(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", layers=3)
    files = ModelFiles.of(read_header(tmp_path / "m.gguf"))
    assert [tensor.name for tensor in files.layers()[1].tensors] == [
        "blk.1.attn_q.weight",
        "blk.1.ffn_up.weight",
        "blk.1.ssm_in.weight",
    ]
    check_store(files, 3)


def test_layers_that_cross_the_parts_of_a_split_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", layers=3, split_max_tensors=5)
    first = next(tmp_path.glob("m-00001-of-*.gguf"))
    files = ModelFiles.of(read_header(first))
    assert len(files.paths) > 3
    assert any(len({tensor.file for tensor in layer.tensors}) > 1 for layer in files.layers())
    check_store(files, 3)


@pytest.mark.parametrize("name", ["smol_path", "gemma_path"])
def test_real_models(name: str, request: pytest.FixtureRequest) -> None:
    files = ModelFiles.of(read_header(request.getfixturevalue(name)))
    layers = files.layers()
    assert len(layers) == files.headers[0].block_count
    assert all(len(layer.tensors) == 7 for layer in layers)
    store = plain_store(files, layers)
    assert all(len(store.layers[layer.index].pieces) == 1 for layer in layers)
    assert all(store.layers[layer.index].n_bytes < layer.n_bytes + (32 << 10) for layer in layers)


def test_patterns_match_exactly_their_tensors() -> None:
    kinds = ("attn_q", "ffn_down", "ffn_down_exps")
    every = [f"blk.{layer}.{kind}.weight" for layer in range(12) for kind in kinds]
    chosen = [name for name in every if name.startswith(("blk.1.", "blk.11.")) or "2.attn_q" in name]
    patterns = pattern_of(chosen)
    assert len(patterns) == 2
    assert [name for name in every if any(re.search(pattern, name) for pattern in patterns)] == chosen


@given(st.data())
def test_a_part_of_a_layer_is_read_to_where_it_says(data: st.DataObject) -> None:
    """Pieces of one block and tensors of any size: what is wanted arrives, and little beside it."""
    sizes = data.draw(st.lists(st.integers(1, 4 * BLOCK), min_size=1, max_size=8))
    ends = list(itertools.accumulate(sizes))
    places = {f"t{number}": end - size for number, (end, size) in enumerate(zip(ends, sizes, strict=True))}
    n_bytes = round_up(ends[-1], BLOCK)
    starts = range(0, n_bytes, BLOCK)
    layer = StoredLayer(3, tuple(Piece(0, 100 * BLOCK + at, at, BLOCK) for at in starts), places, n_bytes)
    names = data.draw(st.sets(st.sampled_from(sorted(places)), min_size=1))
    part = layer.only(names)
    assert set(part.places) == names
    by_block = {piece.at: piece.offset for piece in part.pieces}
    assert sorted(by_block) == list(range(0, part.n_bytes, BLOCK))
    for name, size in zip(places, sizes, strict=True):
        if name in names:
            for at in (part.places[name], part.places[name] + size - 1):
                block = at // BLOCK * BLOCK
                expected = 100 * BLOCK + places[name] + at - part.places[name]
                assert by_block[block] + at - block == expected
    wanted = {
        block
        for name, size in zip(places, sizes, strict=True)
        if name in names
        for block in range(places[name] // BLOCK, (places[name] + size - 1) // BLOCK + 1)
    }
    assert len(part.pieces) <= len(wanted) + len(names)  # a last tensor is followed by what fills its block
