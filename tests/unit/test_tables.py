"""Tables that a model leaves in its file: what plans make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.config import Config
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.layers import LOOKED_UP, ModelFiles
from edgespec.models.gguf.types import TensorInfo
from edgespec.models.gguf.weightless import ModelShape, hollow_files
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileStore

GIB = 1 << 30
SHAPE = ModelShape("gemma4", 35, 2048, 8192, 8, 2, head=256, vocabulary=262_144, tied=True)
TABLE = TensorInfo(LOOKED_UP, (256 * 35, 262_144), 8, 0, 256 * 35 * 262_144 // 32 * 34)


@pytest.fixture
def bare() -> ModelFiles:
    return hollow_files("bare", SHAPE)


@pytest.fixture
def with_table(bare: ModelFiles) -> ModelFiles:
    (header,) = bare.headers
    return ModelFiles((replace(header, tensors=(*header.tensors, TABLE)),))


def planner(files: ModelFiles, memory: int) -> Planner:
    return Planner(files, Config(), MachineSnapshot(FreeMemory(memory), 2, own_kernels=True), ProfileStore())


def test_a_table_is_in_no_layer(bare: ModelFiles, with_table: ModelFiles) -> None:
    assert [table.name for table in with_table.tables] == [LOOKED_UP]
    assert with_table.layers() == bare.layers()
    assert bare.tables == ()


@pytest.mark.parametrize("memory", [13 * GIB // 8, 2 * GIB])
def test_less_memory_leaves_the_table_in_the_file(
    memory: int, bare: ModelFiles, with_table: ModelFiles
) -> None:
    """It takes no memory from the layers, is not streamed, and needs none while it is loaded."""
    plan, without = (planner(files, memory).plan() for files in (with_table, bare))
    assert TABLE.n_bytes > GIB
    assert plan.holding.streamed_bytes == without.holding.streamed_bytes
    assert plan.holding.resident_bytes == without.holding.resident_bytes
    layout = plan.memory.layout
    assert layout is not None
    assert layout.other_bytes < TABLE.n_bytes
    assert all(tensor.name != LOOKED_UP for layer in layout.weights.layers for tensor in layer.tensors)


def test_a_model_that_fits_only_without_its_table_streams_nothing(with_table: ModelFiles) -> None:
    plan = planner(with_table, with_table.tensor_bytes).plan()
    assert not plan.streams
    assert plan.memory.layout is not None
    kept = with_table.tensor_bytes - TABLE.n_bytes
    assert plan.holding.resident_bytes == pytest.approx(kept, rel=0.03)  # layouts take a little more


def test_enough_memory_holds_the_table_too(with_table: ModelFiles) -> None:
    plan = planner(with_table, 16 * GIB).plan()
    assert plan.memory.layout is None
    assert plan.holding.resident_bytes == with_table.tensor_bytes
