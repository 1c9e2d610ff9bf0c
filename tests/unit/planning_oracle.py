"""Placement worked out without a `Plan`: what was predicted, and what a load did, as separate code.

Both are written in terms of footprints alone, so that a plan can be compared with them on simulated machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import NONE, Config
from edgespec.costs.planned_weights import HitRates, PlannedExperts, PlannedWeights
from edgespec.costs.prompts import best_rows
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.experts import LayerWeights, layer_weights
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.offload.layout import EXPERT_PIECE_BYTES, plain_store
from edgespec.offload.packing.pack import gains_from_packing, record_places, tensor_places
from edgespec.planning.devices.assignment import LayerAssignment, read_rate
from edgespec.planning.devices.card_placement import NO_CARDS, place_models
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.devices.workers import assign_to_workers
from edgespec.planning.memory.needs import MAX_PROMPT_ROWS, MemoryNeeds, tied_bytes
from edgespec.planning.memory.placement import LayerPlacement, PoolSizes, place, place_with_experts
from edgespec.planning.memory.rows import PrefillFacts
from edgespec.profiles.store import ProfileStore

_MAX_STREAMED_ROWS = 4096

_STORE = ProfileStore(Path("/nowhere/profiles"))


def predict(
    needs: MemoryNeeds, files: ModelFiles, budget: int, *, streams: bool = False, hits: HitRates | None = None
) -> PlannedWeights:
    """Place weights under a budget, on a processor alone."""
    whole = _whole(needs)
    weights = layer_weights(files)
    layers, expert_bytes = _stored(files, weights, packed=gains_from_packing(files.layers()))
    if (budget >= whole and not streams) or not (layers or expert_bytes):
        return PlannedWeights(budget, whole, files.tensor_bytes)
    beside = files.tensor_bytes - weights.n_bytes - _tables(files)
    other = beside + tied_bytes(files)
    placement = _place(
        layers,
        _pool(weights, expert_bytes, needs.rows),
        budget,
        whole - needs.footprints[0].weights - sum(size.tables for size in needs.footprints[1:]) + other,
        needs.process + other + _largest_beside(files),
    )
    streamed = sum(layers[index] for index in placement.streamed)
    resident = beside + sum(layers[index] for index in placement.resident)
    experts = None
    if placement.expert_slots:
        slots, hits = placement.expert_slots, hits or HitRates()
        experts = PlannedExperts(
            expert_bytes,
            slots,
            weights.n_experts,
            weights.n_used * len(weights.experts),
            hits.at(slots / weights.n_experts),
            measured=hits.measured,
        )
        streamed += experts.missed_bytes(1)
        resident += slots * expert_bytes
    slot = max((layers[index] for index in placement.streamed), default=0)
    return PlannedWeights(budget, whole, resident, streamed, slot, placement.n_slots, experts)


def predict_on(
    machine: MachineSnapshot,
    needs: MemoryNeeds,
    files: ModelFiles,
    drafter: ModelFiles | None,
    budget: int,
    config: Config,
) -> PlannedWeights:
    """Place weights on whatever holds layers."""
    streams = config.memory.offload == "stream"
    if machine.workers is not None:
        assignment = assign_to_workers(machine.workers, needs, files, budget, read_rate(files, _STORE))
        left = assignment.left(needs)
        if _whole(left) <= budget:
            lent = sum(device.free for device in machine.workers.devices)
            return PlannedWeights(budget + lent, _whole(needs), files.tensor_bytes)
        return predict(left, files.without(assignment.names), budget)
    if machine.cards is None:
        return predict(needs, files, budget, streams=streams)
    request = _request(machine, config, files)
    on = place_models(machine.cards, needs, files, drafter, budget, request)
    rest = files if on.assignment is None else files.without(on.assignment.names)
    return predict(on.left(needs), rest, budget, streams=streams)


@dataclass(frozen=True)
class Decision:
    """Result of a load: `placement` is None where nothing is streamed."""

    rows: int
    assignment: LayerAssignment | None
    placement: LayerPlacement | None


def decide(
    machine: MachineSnapshot,
    target: ModelFiles,
    drafter: ModelFiles | None,
    sizes: Mapping[int, MemoryNeeds],
    streamed: Mapping[int, MemoryNeeds],
    budget: int,
    config: Config,
    prefill: PrefillFacts,
) -> Decision:
    """Result of a load of models whose needs for each number of rows are known, in memory and streamed."""

    def measure(lent: int = 0, *, devices: bool = False) -> MemoryNeeds:
        return _measure(target, sizes, streamed, budget + lent, config, prefill, devices=devices)

    assignment: LayerAssignment | None = None
    if machine.workers is not None:
        needs = measure(sum(device.free for device in machine.workers.devices))
        try:
            assignment = assign_to_workers(machine.workers, needs, target, budget)
            suffices = _whole(assignment.left(needs)) <= budget
        except MemoryLimitError:
            suffices = False
        if not suffices:
            needs = measure(devices=True)
            rate = None if config.memory.offload == NONE else read_rate(target, _STORE)
            assignment = assign_to_workers(machine.workers, needs, target, budget, rate)
        assert assignment is not None
        left = assignment.left(needs)
        if _whole(left) <= budget:
            return Decision(needs.rows, assignment, None)
    else:
        needs, on_cards = measure(), NO_CARDS
        if machine.cards is not None:
            request = _request(machine, config, target)
            on_cards = place_models(machine.cards, needs, target, drafter, budget, request)
            assignment = on_cards.assignment
            if assignment is not None:
                needs = measure(assignment.lent_bytes, devices=True)
        left = on_cards.left(needs)
    return Decision(needs.rows, assignment, carry_out(left, target, budget, config, assignment))


def carry_out(
    needs: MemoryNeeds, files: ModelFiles, budget: int, config: Config, assignment: LayerAssignment | None
) -> LayerPlacement | None:
    """The layers that a load streamed; None if it streamed none."""
    whole, offload = _whole(needs), config.memory.offload
    least = whole - sum(size.weights for size in needs.footprints)
    if budget < least:
        raise MemoryLimitError("The caches do not fit.", "", least=least)
    if budget >= whole and offload != "stream":
        return None
    if offload == NONE:
        raise MemoryLimitError("The weights do not fit.", "", least=whole)
    first_there = (files.headers[0].block_count or 0) - (0 if assignment is None else assignment.elsewhere)
    layers = [layer for layer in files.layers() if layer.index < first_there]
    if offload == "mmap" or not layers:
        return None
    chosen = _chosen(files, layers, config)
    packed = config.memory.pack != "never" and gains_from_packing(files.layers())
    stored, expert_bytes = _stored(files, chosen, packed=packed)
    rest = files if assignment is None else files.without(assignment.names)
    other = rest.tensor_bytes - sum(layer.n_bytes for layer in layers) - _tables(files) + tied_bytes(files)
    return _place(
        stored,
        _pool(chosen, expert_bytes, needs.rows),
        budget,
        whole - needs.footprints[0].weights - sum(size.tables for size in needs.footprints[1:]) + other,
        needs.process + other + _largest_beside(rest),
        config.memory.slots,
    )


def _measure(
    files: ModelFiles,
    sizes: Mapping[int, MemoryNeeds],
    streamed: Mapping[int, MemoryNeeds],
    budget: int,
    config: Config,
    prefill: PrefillFacts,
    *,
    devices: bool,
) -> MemoryNeeds:
    """The rows of a pass that suit a budget best."""
    offload, exact = config.memory.offload, config.speculation.exact
    fewest = min(sizes)
    if offload != "stream" and _whole(sizes[fewest]) <= budget:
        if exact and not prefill.own_kernels:
            return sizes[fewest]
        counts = [rows for rows in sizes if rows <= MAX_PROMPT_ROWS]
        return sizes[max(rows for rows in counts if _whole(sizes[rows]) <= budget)]
    alone = config.memory.experts != "never" and bool(layer_weights(files).experts)
    if exact is None:
        exact = offload != "mmap" and not alone
    if exact and (offload == "mmap" or devices):
        return sizes[fewest]
    holdings = {}
    for rows in sorted(streamed):
        try:
            holdings[rows] = predict(streamed[rows], files, budget, streams=True)
        except MemoryLimitError:
            break
    return streamed[best_rows(holdings, prefill.passes, prefill.tokens) if holdings else fewest]


def _chosen(files: ModelFiles, layers: Sequence[Layer], config: Config) -> LayerWeights:
    if config.memory.experts == "never":
        return LayerWeights(tuple(layers))
    return layer_weights(files, layers)


def _whole(needs: MemoryNeeds) -> int:
    return needs.process + sum(size.weights + size.cache + size.buffers for size in needs.footprints)


def _request(machine: MachineSnapshot, config: Config, files: ModelFiles) -> PlacementRequest:
    return PlacementRequest(config.devices, machine.n_threads, _STORE, read_rate=read_rate(files, _STORE))


def _stored(files: ModelFiles, weights: LayerWeights, *, packed: bool) -> tuple[dict[int, int], int]:
    if packed:
        layers = {layer.index: tensor_places(layer)[1] for layer in weights.layers}
        return layers, max((record_places(found)[1] for found in weights.experts), default=0)
    store = plain_store(files, weights.layers, weights.experts)
    layers = {index: stored.n_bytes for index, stored in store.layers.items()}
    return layers, max((stored.n_bytes for stored in store.experts.values()), default=0)


def _pool(weights: LayerWeights, slot_bytes: int, n_rows: int) -> PoolSizes | None:
    if not weights.experts:
        return None
    return PoolSizes(
        slot_bytes + n_rows * weights.n_used * 8 + 80,
        fewest=max(found.n_experts for found in weights.experts),
        most=weights.n_experts,
        beside=weights.n_experts * (3 + slot_bytes // EXPERT_PIECE_BYTES) * 512,
    )


def _place(
    layers: dict[int, int],
    pool: PoolSizes | None,
    budget: int,
    fixed: int,
    loading: int,
    n_slots: int | None = None,
) -> LayerPlacement:
    if pool is None:
        return place(layers, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)
    return place_with_experts(layers, pool, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)


def _largest_beside(files: ModelFiles) -> int:
    elsewhere = {tensor.name for layer in files.layers() for tensor in layer.tensors}
    elsewhere |= {table.name for table in files.tables}
    return max(
        (t.n_bytes for header in files.headers for t in header.tensors if t.name not in elsewhere), default=0
    )


def _tables(files: ModelFiles) -> int:
    """Bytes that stay in the file."""
    return sum(table.n_bytes for table in files.tables)
