"""Products of packed weights: against float64, and the same bits for any rows, ranges, instruction set."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.kernels.products import Processor, Product
from tests.unit.native_products import (
    FLOATS,
    PANEL,
    PER_32,
    PER_256,
    TYPES,
    Array,
    block_values,
    products,
    quantized,
    random_blocks,
    values_of,
)


@pytest.fixture(autouse=True, scope="module")
def _instruction_sets() -> None:
    if not products().isas():
        pytest.skip("the processor has none of the instruction sets")


_SOME_ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 47, 63, 64, 65, 97, 128, 129)


def _length(kind: T, blocks: int) -> int:
    """Values of a row; of float weights an odd number too."""
    return block_values(kind) * blocks if kind not in (T.F16, T.BF16) else 13 * blocks


def _error(out: Array, kind: T, rows: Array, x: Array) -> float:
    """The greatest error against float64 of the same quantized activations, in sums of magnitudes."""
    weights = values_of(kind, rows).astype(np.float64)
    activations = quantized(x, products().kind(kind))
    magnitudes = np.abs(activations) @ np.abs(weights).T
    return float((np.abs(out - activations @ weights.T) / np.maximum(magnitudes, 1e-30)).max())


def _same(a: Array, b: Array) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_packing_loses_nothing(kind: T) -> None:
    random = np.random.default_rng(1)
    k, n = _length(kind, 5), 37
    rows = random_blocks(kind, n, k, random)
    packed = products().pack(kind, rows, k)
    restored = np.stack([products().row(kind, packed, k, row) for row in range(n)])
    assert _same(restored, values_of(kind, rows))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_packing_in_ranges_gives_the_same_bytes(kind: T) -> None:
    random = np.random.default_rng(2)
    k, n = _length(kind, 3), 5 * PANEL - 3
    rows = random_blocks(kind, n, k, random)
    whole = products().pack(kind, rows, k)
    assert np.array_equal(products().pack(kind, rows, k, panels=(1, 2, 4)), whole)
    # A panel is of its own rows alone, so a part of a matrix is a part of its packed form.
    part = products().pack(kind, rows[2 * PANEL : 4 * PANEL], k)
    panel = len(whole) // 5
    assert np.array_equal(part, whole[2 * panel : 4 * panel])


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_number_of_rows_gives_the_same_bits(kind: T) -> None:
    random = np.random.default_rng(3)
    k, n, most = _length(kind, 3), 3 * PANEL + 5, 130
    rows = random_blocks(kind, n, k, random)
    packed = products().pack(kind, rows, k)
    x = random.normal(size=(most, k)).astype(np.float32)
    expected = products().product(products().isas()[0], kind, packed, x, n)
    assert _error(expected, kind, rows, x) < 1e-6
    for isa, count in itertools.product(products().isas(), _SOME_ROWS):
        start = int(random.integers(0, most - count + 1))
        out = products().product(isa, kind, packed, x[start : start + count], n)
        assert _same(out, expected[start : start + count]), (products().name(isa), count)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(TYPES), seed=st.integers(0, 2**32 - 1))
def test_any_shape_and_division_gives_the_same_bits(data: st.DataObject, kind: T, seed: int) -> None:
    random = np.random.default_rng(seed)
    k = _length(kind, data.draw(st.integers(1, 6), "blocks"))
    n = data.draw(st.integers(1, 70), "weights")
    count = data.draw(st.integers(1, 130), "rows")
    rows = random_blocks(kind, n, k, random)
    packed = products().pack(kind, rows, k)
    x = random.normal(0, 10 ** random.uniform(-3, 3), (count, k)).astype(np.float32)
    expected = products().product(products().isas()[0], kind, packed, x, n)
    assert _error(expected, kind, rows, x) < 1e-6
    panels = -(-n // PANEL)
    for isa in products().isas():
        ends = sorted(data.draw(st.sets(st.integers(1, count), max_size=3), "quantized in ranges") - {count})
        activations = products().activations(isa, products().kind(kind), x, tuple(ends))
        cuts = sorted(data.draw(st.sets(st.integers(0, panels), max_size=4), "panels") | {0, panels})
        order = random.permutation(count).astype(np.int64)
        out = np.full((count, n + 3), np.nan, np.float32)
        for part in random.permutation(np.stack([cuts[:-1], cuts[1:]], 1)):
            given_range = (int(part[0]), int(part[1]))
            products().multiply(
                isa, kind, packed, activations, k, n, count, panels=given_range, out=out, out_rows=order
            )
        assert _same(out[order][:, :n].copy(), expected), products().name(isa)
        assert np.isnan(out[:, n:]).all()  # nothing is written behind the columns


@pytest.mark.parametrize("fill", [0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF])
@pytest.mark.parametrize("kind", TYPES[:-2], ids=lambda kind: kind.name)
def test_extreme_quants_overflow_nowhere(kind: T, fill: int) -> None:
    random = np.random.default_rng(4)
    k, n = _length(kind, 4), PANEL
    rows = random_blocks(kind, n, k, random, fill)
    packed = products().pack(kind, rows, k)
    x = np.ones((6, k), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, ::3] = 0
    x[4] = 0
    x[5] = np.tile([1e-3, 1], k // 2)
    expected = products().product(products().isas()[0], kind, packed, x, n)
    assert _error(expected, kind, rows, x) < 1e-6
    for isa in products().isas():
        assert _same(products().product(isa, kind, packed, x, n), expected), products().name(isa)


@pytest.mark.parametrize("kind", TYPES[:-2], ids=lambda kind: kind.name)
def test_a_nan_or_an_infinity_spoils_its_own_row_alone(kind: T) -> None:
    random = np.random.default_rng(5)
    k, n = _length(kind, 4), PANEL
    packed = products().pack(kind, random_blocks(kind, n, k, random), k)
    x = random.normal(size=(5, k)).astype(np.float32)
    clean = products().product(products().isas()[0], kind, packed, x, n)
    x[1, 7], x[3, 9] = np.nan, -np.inf
    for isa in products().isas():
        out = products().product(isa, kind, packed, x, n)
        assert np.isnan(out[[1, 3]]).all()
        assert _same(out[::2].copy(), clean[::2].copy())


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_K], ids=lambda kind: kind.name)
def test_activations_near_zero_are_not_infinite(kind: T) -> None:
    random = np.random.default_rng(6)
    k, n = _length(kind, 4), PANEL
    rows = random_blocks(kind, n, k, random)
    packed = products().pack(kind, rows, k)
    x = np.repeat(np.array([0, 1e-45, 1e-38, 1e-36, 1e-30], np.float32)[:, None], k, 1)
    for isa in products().isas():
        out = products().product(isa, kind, packed, x, n)
        assert np.abs(out).max() < 1e-25
        assert not out[0].any()
        assert out[4].any()


@pytest.mark.parametrize("kind", [PER_256, PER_32, FLOATS])
def test_all_instruction_sets_quantize_to_the_same_bytes(kind: int) -> None:
    random = np.random.default_rng(7)
    x = random.normal(0, 1, (37, 512)).astype(np.float32)
    x[3] = np.round(x[3] * 8) / 8  # ties between two quants
    x[4] = 0
    made = [products().activations(isa, kind, x) for isa in products().isas()]
    assert all(np.array_equal(each, made[0]) for each in made)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_results_are_as_accurate_as_those_of_ggml(kind: T) -> None:
    random = np.random.default_rng(8)
    k, n = 1024, 4 * PANEL
    rows = random_blocks(kind, n, k, random)
    x = random.normal(size=(16, k)).astype(np.float32)
    exact = x.astype(np.float64) @ values_of(kind, rows).astype(np.float64).T
    with Processor(1) as processor, Product(processor, int(kind), (k, n), rows.tobytes(), None, x) as of_ggml:
        of_ggml.compute()
        error_of_ggml = np.sqrt(np.mean((of_ggml.result() - exact) ** 2))
    out = products().product(products().isas()[-1], kind, products().pack(kind, rows, k), x, n)
    error = np.sqrt(np.mean((out - exact) ** 2))
    assert error <= 1.1 * error_of_ggml + 1e-6 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_K, T.F16], ids=lambda kind: kind.name)
def test_no_rows_have_no_results(kind: T) -> None:
    random = np.random.default_rng(9)
    packed = products().pack(kind, random_blocks(kind, PANEL, 256, random), 256)
    for isa in products().isas():
        assert products().product(isa, kind, packed, np.empty((0, 256), np.float32), PANEL).size == 0


def test_what_is_unknown_is_refused() -> None:
    library = products().library
    assert library.edgespec_type_block(int(T.IQ1_S)) == 0
    assert library.edgespec_activation_kind(int(T.F32)) == -1
    assert library.edgespec_packed_bytes(int(T.IQ1_S), 256, 16) == 0
    assert products().isa("mmx") == -1
    assert [products().isa(products().name(isa)) for isa in range(6)] == list(range(6))


def test_the_list_of_types_is_that_of_the_tests() -> None:
    room = (ctypes.c_int * 64)()
    count = products().library.edgespec_types(room, 64)
    assert set(room[:count]) == {int(kind) for kind in TYPES}
