"""Layers in parts: every matrix once, in the order of reading, and none larger than it must be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.models.gguf.layers import FileTensor, Layer
from edgespec.models.gguf.parts import split_layers

NAMES = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def layer(index: int, sizes: dict[str, int]) -> Layer:
    """A layer whose matrices lie in the file in the order of their names."""
    tensors, offset = [], index << 20
    for name, size in sorted(sizes.items()):
        tensors.append(FileTensor(f"blk.{index}.{name}.weight", 0, (size,), 0, offset, size))
        offset += size
    return Layer(index, tuple(tensors))


def order_of(layers: tuple[Layer, ...]) -> tuple[str, ...]:
    """The matrices as a pass reads them."""
    known = {tensor.name for layer in layers for tensor in layer.tensors}
    names = [f"blk.{layer.index}.{name}.weight" for layer in layers for name in NAMES]
    return tuple(name for name in names if name in known)


sizes_of_layers = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 100), min_size=1), min_size=1, max_size=6
)


@given(sizes_of_layers, st.integers(1, 300))
def test_parts_hold_each_matrix_once_in_the_order_of_reading(
    sizes: list[dict[str, int]], part_bytes: int
) -> None:
    layers = tuple(layer(index, of_layer) for index, of_layer in enumerate(sizes))
    order = order_of(layers)
    parts = split_layers(layers, order, part_bytes)
    held = [{tensor.name for tensor in part.tensors} for part in parts]
    assert sorted(name for names in held for name in names) == sorted(order)
    assert [part.index for part in parts] == list(range(len(parts)))
    for one, following in pairwise(held):
        assert max(map(order.index, one)) < min(map(order.index, following))
    for part in parts:
        assert len({tensor.name.split(".")[1] for tensor in part.tensors}) == 1
        assert list(part.tensors) == sorted(part.tensors, key=lambda tensor: tensor.offset)
        of_layer = layers[int(part.tensors[0].name.split(".")[1])]
        assert part.n_bytes <= max(part_bytes, *(tensor.n_bytes for tensor in of_layer.tensors))


TWO = tuple(layer(index, dict.fromkeys(NAMES, 50)) for index in range(2))


@pytest.mark.parametrize(
    "order",
    [
        (),
        order_of(TWO)[:-1],
        (*order_of(TWO), order_of(TWO)[0]),
        tuple(reversed(order_of(TWO))),
        tuple(sorted(order_of(TWO), key=lambda name: name.split(".")[2])),
    ],
    ids=["unknown", "incomplete", "read twice", "backwards", "interleaved"],
)
def test_layers_stay_whole_where_a_pass_does_not_read_them_in_one_go(order: tuple[str, ...]) -> None:
    assert split_layers(TWO, order, 1) is TWO


def test_a_matrix_may_have_several_readers_in_a_row() -> None:
    order = tuple(name for name in order_of(TWO) for _ in range(2))
    assert len(split_layers(TWO, order, 1)) == 2 * len(NAMES)


def test_small_layers_stay_whole() -> None:
    assert split_layers(TWO, order_of(TWO), 250) is TWO
