"""ggml's numbers of operations, found by making a node of each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count

from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import F16, F32, I32, UnsupportedBuild, require_same
from edgespec.kernels.ggml.tensors import ScratchContext, operation_of, read_node, shape_of


@cache
def product() -> int:
    """A product with one matrix.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with ScratchContext() as scratch:
        matrix, rows = scratch.tensor(F32, (32, 8)), scratch.tensor(F32, (32, 3))
        node = functions()["ggml_mul_mat"](scratch.handle, matrix, rows)
        require_same("the sources of a product", read_node(node)[:2], (matrix, rows))
        return operation_of(node)


@cache
def indexed_product() -> int:
    """A product with matrices that are chosen by index.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with ScratchContext() as scratch:
        stack = scratch.tensor(F32, (32, 8, 4))
        rows, indices = scratch.tensor(F32, (32, 1, 3)), scratch.tensor(I32, (2, 3))
        node = functions()["ggml_mul_mat_id"](scratch.handle, stack, rows, indices)
        require_same("the sources of an indexed product", read_node(node)[:3], (stack, rows, indices))
        require_same("the shape of an indexed product", shape_of(node).sizes, (8, 2, 3, 1))
        return operation_of(node)


@cache
def rows_operation() -> int:
    """Rows of a matrix that are chosen by index.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with ScratchContext() as scratch:
        matrix, indices = scratch.tensor(F32, (32, 8)), scratch.tensor(I32, (3,))
        node = functions()["ggml_get_rows"](scratch.handle, matrix, indices)
        require_same("the sources of chosen rows", read_node(node)[:2], (matrix, indices))
        return operation_of(node)


@cache
def attention_operation() -> int:
    """Flash attention.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with ScratchContext() as scratch:
        # Keys and values of eight cells, and queries of four rows.
        queries, keys, values = (scratch.tensor(t, (32, n, 2)) for t, n in ((F32, 4), (F16, 8), (F16, 8)))
        mask = scratch.tensor(F16, (8, 4))
        node = functions()["ggml_flash_attn_ext"](scratch.handle, queries, keys, values, mask, 1.0, 0.0, 0.0)
        require_same("the sources of attention", read_node(node)[:4], (queries, keys, values, mask))
        require_same("the shape of attention", shape_of(node).sizes, (32, 2, 4, 1))
        return operation_of(node)


_LAST = "GLU"  # behind the last one there is no name


@cache
def operation_named(name: str) -> int:
    """The operation with this name of ggml's.

    Raises:
        UnsupportedBuild: there is none.
    """
    for number, found in enumerate(_names()):
        if found == name:
            return number
    raise UnsupportedBuild(f"it has no operation {name}")


def _names() -> Iterator[str]:
    for number in count():
        name: str = functions()["ggml_op_name"](number).decode()
        yield name
        if name == _LAST:
            return
