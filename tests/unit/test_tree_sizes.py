"""Limits of tree sizes, by memory and by what passes take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.loading.load import load
from edgespec.machine.memory import FreeMemory
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint, footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.planner import Planner
from edgespec.planning.tree_sizes import usual_nodes
from edgespec.profiles.store import PassProfile, ProfileStore, machine_identity
from edgespec.speculation.tree import MAX_LEAVES

MIB = 1 << 20
FLAT = Curve((1, 64, 256), (0.1, 0.2, 0.5))
HALF: dict[str, Any] = {"memory": 2500 * MIB}


@pytest.fixture(scope="module")
def model(smol_path: Path) -> ModelFiles:
    return ModelFiles.of(read_header(smol_path))


def options(**more: Any) -> Config:
    chosen = {"draft": "lookup", "context": 512, "gpu_layers": 0, "offload": "stream", "memory": 4096 * MIB}
    return Config.of(**(chosen | more))


def planner(
    model: ModelFiles, store: ProfileStore | None = None, *, own_kernels: bool = True, **more: Any
) -> Planner:
    machine = MachineSnapshot(FreeMemory(64 << 30), 1, own_kernels=own_kernels)
    return Planner(model, options(**more), machine, store or ProfileStore())


def nodes(
    model: ModelFiles,
    curve: Curve | None = None,
    *,
    read_rate: float = 1e9,
    overlap: float = 4.0,
    **more: Any,
) -> int:
    """Nodes of trees, with measured passes if there is a curve."""
    store = ProfileStore()
    if curve is not None:
        fingerprint = model.headers[0].fingerprint
        key = machine_identity() | {"threads": str(known_threads(fingerprint, store)), "model": fingerprint}
        passes = PassProfile(curve, streamed=True, read_rate=read_rate, overlap=overlap)
        store.put(key | {"mode": "test"}, passes)
    return usual_nodes(planner(model, store, **more))


def test_a_model_that_fits_in_memory_has_usual_trees(model: ModelFiles) -> None:
    assert nodes(model, FLAT, offload="auto") == USUAL_NODES


@pytest.mark.parametrize(
    "why",
    [{"memory": 200 * MIB}, {"draft": "none"}, {"exact": False}, {"tree_budget": 8}, {"offload": "none"}],
)
def test_where_they_cost_too_much_or_help_nobody_trees_stay_small(
    model: ModelFiles, why: dict[str, Any]
) -> None:
    assert nodes(model, **why) == USUAL_NODES


def test_without_own_kernels_trees_stay_small(model: ModelFiles) -> None:
    assert nodes(model, own_kernels=False) == USUAL_NODES


@pytest.fixture(scope="module")
def large() -> ModelFiles:
    """The shapes of a model of 5 GB, and a vocabulary of 152,000 tokens."""
    model = catalog.entries()["qwen3-8b"].hollow
    assert model is not None
    return model


def read_seconds(model: ModelFiles, read_rate: float) -> float:
    """Seconds that a pass reads with memory for half of the large model."""
    return planner(model, **HALF).plan().holding.streamed_bytes / read_rate


def test_trees_grow_with_what_a_row_costs_against_reading(large: ModelFiles) -> None:
    sizes = [nodes(large, FLAT.scaled(factor), read_rate=300e6, **HALF) for factor in (1.0, 4.0, 16.0, 64.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * USUAL_NODES
    assert sizes[-1] == USUAL_NODES


def test_sizes_follow_the_row_at_which_arithmetic_takes_longer_than_reading(large: ModelFiles) -> None:
    read_s = read_seconds(large, 0.2e9)
    corners = (88, 104, 136, 184)
    sizes = [
        nodes(
            large, Curve((1, row, 256), (0.05 * read_s, 0.1 * read_s, 20 * read_s)), read_rate=0.2e9, **HALF
        )
        for row in corners
    ]
    assert sizes == sorted(set(sizes)), "no two are alike"
    assert all(size <= row + 8 for size, row in zip(sizes, corners, strict=True))


@pytest.mark.parametrize(("cores", "read_rate"), [(8, 1.5e9), (2, 0.3e9)])
def test_more_cores_and_slower_disks_have_larger_trees(
    large: ModelFiles, cores: int, read_rate: float
) -> None:
    """Against two cores and a disk that is as fast as they are."""
    read_s = read_seconds(large, 1.5e9)
    two_cores = Curve((1, 64, 256), (0.2 * read_s, read_s, 4 * read_s))

    def size(cores: int, read_rate: float) -> int:
        return nodes(large, two_cores.scaled(2 / cores), read_rate=read_rate, overlap=2.0, **HALF)

    assert size(cores, read_rate) > size(2, 1.5e9)


def test_logits_that_weights_are_read_for_keep_trees_smaller(
    large: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node's logits take ten times the memory, fewer nodes pay."""

    def more_logits(files: ModelFiles, **shape: Any) -> Footprint:
        return footprint(files, **{**shape, "n_outputs": 10 * shape["n_outputs"] - 9 * USUAL_NODES})

    curve = FLAT.scaled(0.1)
    without = nodes(large, curve, read_rate=300e6)
    monkeypatch.setattr("edgespec.planning.memory.needs.footprint", more_logits)
    assert nodes(large, curve, read_rate=300e6) < without


@pytest.mark.parametrize(
    ("asked", "rows", "sequences"),
    [
        ({}, 64, 64),
        ({"usual_nodes": 128}, 128, 136),
        ({"tree_budget": 96}, 96, 104),
        ({"tree_budget": 1000}, 1000, MAX_LEAVES - 1),
        ({"parallel": 100}, 100, 108),
        ({"parallel": "auto"}, 64, 64),
    ],
)
def test_rows_with_logits_and_sequences_follow(
    model: ModelFiles, asked: dict[str, Any], rows: int, sequences: int
) -> None:
    usual = asked.pop("usual_nodes", USUAL_NODES)
    context = replace(planner(model, **asked), usual_nodes=usual).context
    assert (context.n_outputs, context.n_sequences) == (rows, sequences)
    assert context.drafter_sequences == (sequences if asked else 64)


def test_padded_exact_decoding_refuses_larger_trees_before_anything_is_loaded(
    smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.errors import UsageError

    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    with pytest.raises(UsageError, match=r"^tree_budget=100 is too large"):
        load(smol_path, tree_budget=100, exact=True)
