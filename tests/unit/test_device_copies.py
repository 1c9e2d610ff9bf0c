"""Copies of streamed weights on a device; the processor's own buffers stand for those of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.offload.device_copies import DeviceCopies

NAME = b"blk.0.ffn_up.weight"
SHAPE = (32, 64)
PLACE = (3, b"ffn_up-0")


class Weight:
    """A weight whose layer comes and goes, and the scheduler's copy of it."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._f = ggml.functions()
        self._scratch = ggml.ScratchContext()
        self.layer = values
        self.tensor = self._scratch.tensor(ggml.F32, SHAPE, NAME)
        self.copy = self._scratch.tensor(ggml.F32, SHAPE, b"CUDA0#%b#0" % NAME)
        self._buffer = self._f["ggml_backend_buft_alloc_buffer"](ggml.plain_buffer_type(), values.nbytes)
        base = self._f["ggml_backend_buffer_get_base"](self._buffer)
        self._f["ggml_backend_tensor_alloc"](self._buffer, self.copy, base)

    def enter(self) -> None:
        ggml.set_data(self.tensor, self.layer.ctypes.data)

    def schedule(self) -> None:
        """Copy from wherever the tensor points to, as the scheduler does."""
        data = self._f["ggml_get_data"](self.tensor)
        self._f["ggml_backend_tensor_set"](self.copy, data, 0, self.layer.nbytes)

    @property
    def copied(self) -> NDArray[np.float32]:
        values = np.empty_like(self.layer)
        self._f["ggml_backend_tensor_get"](self.copy, values.ctypes.data, 0, values.nbytes)
        return values

    def close(self) -> None:
        self._f["ggml_backend_buffer_free"](self._buffer)
        self._scratch.__exit__()


@pytest.fixture(params=[0, 1500], ids=["", "with leading zeros"])
def weight(request: pytest.FixtureRequest) -> Iterator[Weight]:
    values = np.arange(1, 1 + SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE[::-1])
    values.ravel()[: request.param] = 0
    with closing(Weight(values)) as found:
        yield found


def copies_of(weight: Weight) -> tuple[DeviceCopies, dict[Address, Address]]:
    copies = DeviceCopies({NAME: weight.tensor})
    read = copies.read_by((weight.copy, weight.tensor, 0))
    assert read == {weight.copy: weight.tensor}
    return copies, read


def test_a_copy_that_is_made_before_the_layer_is_there_is_made_again(weight: Weight) -> None:
    copies, read = copies_of(weight)
    with closing(copies):
        for _ in range(2):
            weight.schedule()
            assert not weight.copied.any(), "the tensor points to zeros"
            weight.enter()
            copies.provide(PLACE, read, known=True)
            assert np.array_equal(weight.copied, weight.layer)
            assert not copies.are_right(PLACE)
            copies.leave(read.values())


def test_a_copy_of_the_layer_is_right_from_then_on(weight: Weight) -> None:
    copies, read = copies_of(weight)
    with closing(copies):
        weight.enter()
        weight.schedule()
        copies.provide(PLACE, read, known=True)
        assert copies.are_right(PLACE)
        assert not copies.are_right((PLACE[0] + 1, PLACE[1]))


def test_copies_are_made_again_in_a_graph_that_is_not_known(weight: Weight) -> None:
    copies, read = copies_of(weight)
    with closing(copies):
        weight.enter()
        copies.provide(PLACE, read, known=False)
        assert np.array_equal(weight.copied, weight.layer)
        assert not copies.are_right(PLACE)


def test_a_weight_of_zeros_is_copied_in_every_pass() -> None:
    with closing(Weight(np.zeros(SHAPE[::-1], np.float32))) as weight:
        copies, read = copies_of(weight)
        with closing(copies):
            weight.enter()
            weight.schedule()
            copies.provide(PLACE, read, known=True)
            assert not copies.are_right(PLACE)
