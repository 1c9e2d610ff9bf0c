"""The ring of slots: what shares one, and when it is filled anew."""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.files.positioned import BLOCK
from edgespec.offload.layer_ring import LayerRing
from edgespec.offload.layout import Piece, Store, StoredLayer
from edgespec.offload.store_reader import StoreReader


def store_of(path: Path, sizes: list[int]) -> Store:
    """Layers of so many blocks, one behind the other; each block of layer n is filled with n."""
    layers, at = {}, 0
    with path.open("wb") as file:
        for number, blocks in enumerate(sizes):
            file.write(bytes([number]) * blocks * BLOCK)
            piece = Piece(0, at, 0, blocks * BLOCK)
            layers[number] = StoredLayer(number, (piece,), {}, blocks * BLOCK)
            at += blocks * BLOCK
    return Store((path,), layers, {}, packed=False)


def content(ring: LayerRing, layer: int, blocks: int) -> bytes:
    return ctypes.string_at(ring.acquire(layer, lambda: False), blocks * BLOCK)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ring") / "layers.bin"


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=12),
    n_slots=st.integers(2, 4),
    stops=st.lists(st.integers(1, 12), max_size=3),
)
def test_every_layer_is_what_was_stored_wherever_a_pass_ends(
    path: Path, sizes: list[int], n_slots: int, stops: list[int]
) -> None:
    store = store_of(path, sizes)
    with (
        closing(StoreReader(store)) as reader,
        closing(LayerRing(reader, range(len(sizes)), n_slots=n_slots, n_threads=2)) as ring,
    ):
        for stop in (*stops, len(sizes), len(sizes)):
            for layer, blocks in list(enumerate(sizes))[:stop]:
                assert content(ring, layer, blocks) == bytes([layer]) * blocks * BLOCK
                ring.release(layer)
            ring.restart()


def test_small_layers_that_follow_one_another_share_a_slot(path: Path) -> None:
    """While the large layer is in use, everything up to the next one is read."""
    store = store_of(path, [8, 2, 6, 8, 2, 6])
    with (
        closing(StoreReader(store)) as reader,
        closing(LayerRing(reader, range(6), n_slots=2, n_threads=2)) as ring,
    ):
        content(ring, 0, 8)
        assert [load.what for load in ring._coming] == [1, 2]
        one, two = (ring.slots.address_of_load(load) for load in ring._coming)
        assert two == one + 2 * BLOCK
        ring.release(0)
        content(ring, 1, 2)
        ring.release(1)
        assert [load.what for load in ring._coming] == [2, 3], "the slot is in use until both have left"
        content(ring, 2, 6)
        ring.release(2)
        assert [load.what for load in ring._coming] == [3, 4, 5]
