"""Measure a mixture's reads: found without weights, and read with nothing computed in between."""

from __future__ import annotations

import time
from contextlib import closing

from edgespec.engine.engine import Engine
from edgespec.offload.experts.pool import FadingCounts
from edgespec.offload.layout import Store
from edgespec.offload.slot_filler import SlotFiller, SlotLoad
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weights import N_EXPERT_READERS, StreamedWeights

MAX_AT_ONCE = 16  # experts that are read at once when nothing is computed
Choices = list[tuple[int, list[int], list[float]]]  # of a pass: layer, experts, shares of the rows


def oracle(passes: list[Choices], n_slots: int, per_layer: int, last: int) -> list[list[int]]:
    """Experts that the last passes miss, by layer, under the same policy without weights, threads or slots.

    Experts are numbered as in the pool.
    """
    n_layers = max(layer for one in passes for layer, _, _ in one) + 1
    counts, held, missed = FadingCounts(n_layers * per_layer), set[int](), []
    for number, chosen in enumerate(passes):
        counts.next_pass()
        for layer, experts_, shares in chosen:
            needed = [layer * per_layer + expert for expert in experts_]
            counts.add(needed, shares)
            absent = set(needed) - held
            if number >= len(passes) - last and absent:
                missed.append(sorted(absent))
            held |= absent
            if len(held) > n_slots:
                spare = sorted(held - set(needed), key=lambda expert: counts.worth[expert])
                held -= set(spare[: len(held) - n_slots])
    return missed


def read_alone(engine: Engine, missed: list[list[int]]) -> float:
    """Seconds to read groups of experts, one after the other, each of them at once."""
    weights = engine.target.model.weights
    assert isinstance(weights, StreamedWeights)
    store = weights.store
    per_layer = store.experts[0].n_experts
    with closing(StoreReader(store)) as reader, closing(slots_for(store, reader)) as slots:
        for warm in (True, False):  # the first time, checksums are compared, and memory is taken
            start = time.perf_counter()
            for group in missed[: len(missed) // 4] if warm else missed:
                loads = [SlotLoad(number, at % MAX_AT_ONCE) for at, number in enumerate(group)]
                with slots.waiting():
                    for load in loads:
                        layer, expert = divmod(load.what, per_layer)
                        slots.read(load, store.experts[layer].reads(expert))
                    while any(load.missing for load in loads):
                        slots.wait(lambda: False)
    return time.perf_counter() - start


def slots_for(store: Store, reader: StoreReader) -> SlotFiller:
    """A few slots for experts."""
    return SlotFiller(
        reader,
        n_slots=MAX_AT_ONCE,
        slot_bytes=max(found.n_bytes for found in store.experts.values()),
        n_threads=N_EXPERT_READERS,
        on_ended=lambda load: not load.missing,
    )
