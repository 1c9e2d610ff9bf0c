"""Limits of tree sizes, by memory and by what passes take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.loading import tree_sizes
from edgespec.loading.devices.machine import MachineSnapshot
from edgespec.loading.load import load
from edgespec.loading.plan import Planner
from edgespec.loading.tree_sizes import usual_nodes
from edgespec.machine.memory import FreeMemory
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import LARGE_NODES, USUAL_NODES
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.profiles.store import PassProfile, ProfileStore, machine_identity
from edgespec.speculation.tree import MAX_LEAVES

MIB = 1 << 20
FLAT = Curve((1, 256), (1e-6, 1e-6))
STEEP = Curve((1, 64, 128), (1e-6, 1e-6, 60.0))
SLOW = Curve((1, 64), (0.1, 60.0))


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


def nodes(model: ModelFiles, curve: Curve | None = None, **more: Any) -> int:
    store = ProfileStore()
    if curve is not None:
        fingerprint = model.headers[0].fingerprint
        key = machine_identity() | {"threads": str(known_threads(fingerprint, store)), "model": fingerprint}
        store.put(key | {"mode": "test"}, PassProfile(curve, streamed=True, read_rate=1.0))
    return usual_nodes(planner(model, store, **more))


def test_streamed_models_may_have_large_trees(model: ModelFiles) -> None:
    assert nodes(model) == LARGE_NODES
    assert nodes(model, offload="auto") == USUAL_NODES, "it fits in memory"


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


def test_measured_passes_say_which_rows_are_free(model: ModelFiles) -> None:
    tight = {"memory": model.tensor_bytes - MIB, "offload": "auto"}  # one byte a second is read
    for curve, allowed in ((FLAT, 256), (STEEP, LARGE_NODES), (SLOW, USUAL_NODES)):
        scaled = Curve(curve.rows, tuple(s * MIB / 30 for s in curve.seconds))
        assert tree_sizes._allowed(10_000, scaled, float(MIB)) == allowed
        assert tree_sizes._allowed(100, scaled, float(MIB)) == USUAL_NODES, "no memory for their logits"
        assert nodes(model, scaled, **tight) in (USUAL_NODES, allowed)


@pytest.mark.parametrize(
    ("asked", "rows", "sequences"),
    [
        ({}, 64, 64),
        ({"usual_nodes": 128}, 128, 136),
        ({"tree_budget": 96}, 96, 104),
        ({"tree_budget": 1000}, 1000, MAX_LEAVES),
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
