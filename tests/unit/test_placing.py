"""Placement of layers and drafters on graphics cards: arithmetic over what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import DevicesConfig
from edgespec.costs.curves import Curve
from edgespec.errors import MemoryLimitError
from edgespec.kernels import report_store
from edgespec.kernels.layouts import available_layouts
from edgespec.kernels.report import TrialReport
from edgespec.kernels.setting import PLAIN, VARIABLE
from edgespec.measure.derived_passes import known_products
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader, TensorInfo
from edgespec.planning.devices.assignment import (
    LayerAssignment,
    layer_seconds,
    layer_sizes,
    output_bytes,
    remote_parts,
)
from edgespec.planning.devices.card_placement import CardPlacement, place_models
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.finding import UNPINNED, PlacementRequest, describe
from edgespec.planning.devices.placing import (
    RESERVED_SHARE,
    card_room,
    drafter_card,
    place_on_cards,
    without,
)
from edgespec.planning.devices.splitting import AssignmentCosts
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import ProfileKeys, ProfileStore

LAYERS, LAYER, OUTSIDE = 10, 100 << 20, 50 << 20
CACHE, BUFFERS, PROCESS = 20 << 20, 30 << 20, 60 << 20
CELLS = CACHE // LAYERS
SECONDS = (1e-10, 2e-10, 4e-10)


def files() -> ModelFiles:
    names = [("token_embd.weight", OUTSIDE), ("output.weight", OUTSIDE)]
    names += [(f"blk.{index}.ffn_up.weight", LAYER) for index in range(LAYERS)]
    tensors = tuple(TensorInfo(name, (64, 64), 0, 0, size) for name, size in names)
    metadata = {"general.architecture": "llama", "llama.block_count": LAYERS, "llama.embedding_length": 4096}
    return ModelFiles((GGUFHeader(Path("m.gguf"), 3, metadata, tensors, 32, 0, 0, "f"),))


def needs(*drafters: Footprint) -> MemoryNeeds:
    weights = LAYERS * LAYER + 2 * OUTSIDE
    return MemoryNeeds([Footprint(weights, CACHE, BUFFERS), *drafters], PROCESS, 64)


def card(slowness: float, layers: float, *, name: str = "CUDA0", shared: bool = False) -> Card:
    """A card with room for so many layers beside its buffers."""
    free = int((layers * (LAYER + CELLS) + BUFFERS) / (1 - 1 / RESERVED_SHARE)) + (1 << 20)
    seconds = tuple(slowness * s for s in SECONDS)
    profile = DeviceProfile(seconds, SECONDS, Curve.through([(1 << 14, 1e-5), (1 << 24, 2e-3)]))
    return Card(name, "a card", free, free, shared, profile)


def cards(*those: Card) -> Cards:
    return Cards.of(those, 0)


def room(layers: float) -> int:
    """This machine's memory, with room for so many layers."""
    return int(layers * (LAYER + CELLS)) + PROCESS + BUFFERS + 2 * OUTSIDE


def asked(layers: int | str = "auto", **more: Any) -> PlacementRequest:
    return PlacementRequest(DevicesConfig(gpu_layers=layers), 1, ProfileStore(), **more)


def place(found: Cards, memory: int, request: PlacementRequest | None = None) -> tuple[int, tuple[int, ...]]:
    assignment = place_on_cards(found, needs(), files(), memory, request or asked())
    return assignment.here, assignment.counts


def test_the_processor_is_as_fast_as_the_kernels_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["forbidden", *(layout.name for layout in available_layouts())]
    report = TrialReport(seconds={0: {PLAIN: (4.0,) * 3, **dict.fromkeys(names, (1.0,) * 3)}})
    monkeypatch.setattr(report_store, "_found", report)
    monkeypatch.setenv(VARIABLE, PLAIN)
    own, _ = layer_seconds(cards(card(1, layers=0)), files(), rows=8)
    assert own == pytest.approx(SECONDS[1] * LAYER)
    known = known_products(ProfileStore(), 1, 0)
    monkeypatch.setattr(report_store, "_found", TrialReport(seconds={0: {PLAIN: (4.0,) * 3}}))
    assert known == known_products(ProfileStore(), 1, 0)


def test_a_fast_card_gets_what_it_holds() -> None:
    assert place(cards(card(0.1, 4)), room(20)) == (6, (4,))
    assert place(cards(card(0.1, 40)), room(20)) == (0, (10,))


def test_a_card_that_is_about_as_fast_gets_nothing_that_there_is_room_for() -> None:
    assert place(cards(card(0.95, 40)), room(20)) == (10, (0,))
    assert place(cards(card(3.0, 40)), room(20)) == (10, (0,))


def test_a_slow_card_gets_what_would_be_read_from_disk() -> None:
    disk = asked(read_rate=1e8)  # a layer takes a second
    assert place(cards(card(3.0, 40)), room(6), disk) == (6, (4,))
    assert place(cards(card(3.0, 2)), room(6), disk) == (8, (2,))  # the rest is streamed
    fast = asked(read_rate=1e13)
    assert place(cards(card(3.0, 40)), room(6), fast) == (10, (0,))


def test_a_number_is_obeyed_as_far_as_there_is_room() -> None:
    slow = cards(card(9.0, 4.5))
    assert place(slow, room(20), asked(3)) == (7, (3,))
    assert place(slow, room(20), asked(9)) == (6, (4,))
    assert place(slow, room(20), asked("all")) == (6, (4,))
    assert place(slow, room(20), asked(0)) == (10, (0,))


def test_the_fastest_card_is_filled_first() -> None:
    two = cards(card(0.5, 3, name="A"), card(0.1, 4, name="B"))
    assert place(two, room(20)) == (3, (3, 4))
    assert place(two, room(20), asked(5)) == (5, (1, 4))


def test_the_output_follows_all_layers_if_it_fits() -> None:
    beside = OUTSIDE / (LAYER + CELLS)
    for layers, fits in ((10.1, False), (10.2 + beside, True)):
        assignment = place_on_cards(cards(card(0.1, layers)), needs(), files(), room(20), asked("all"))
        assert (assignment.here, assignment.output) == (0, fits)
        assert ("the output on CUDA0" in assignment.where) == fits
    assert output_bytes(files()) == OUTSIDE
    some = place_on_cards(cards(card(0.1, 40)), needs(), files(), room(20), asked(10))
    assert not some.output  # a number counts layers


def test_a_card_without_room_for_a_layer_is_an_error_only_where_layers_were_asked_for() -> None:
    full = cards(card(0.1, 0.5))
    assert place(full, room(20)) == (10, (0,))
    with pytest.raises(MemoryLimitError, match=r"No layer fits on a device: one takes 102\.0 MiB"):
        place(full, room(20), asked("all"))


def limited(found: Card, layers: float) -> Card:
    """A card that may be given so many layers, and its buffers."""
    return replace(found, limit=int(layers * (LAYER + CELLS)) + BUFFERS)


def test_a_card_that_ran_out_of_memory_gets_no_more_than_its_limit() -> None:
    for layers in ("auto", "all", 8):
        assert place(cards(limited(card(0.1, 8), 3.5)), room(20), asked(layers)) == (7, (3,))
    two = cards(card(0.1, 4, name="A"), limited(card(0.5, 4, name="B"), 1))
    assert place(two, room(20), asked("all")) == (5, (4, 1))
    assert place(cards(limited(card(0.1, 8), 0.9)), room(20), asked("all")) == (10, (0,))  # and no error


def test_less_is_planned_each_time_that_a_card_runs_out_of_memory() -> None:
    found, model, planned = cards(card(0.1, 8.1)), files(), []
    while True:
        placed = place_models(found, needs(), model, None, room(20), asked("all"))
        planned.append(placed.layers_there)
        if not placed.planned:
            break
        ((_, n_bytes),) = placed.planned
        assert n_bytes == placed.layers_there * (LAYER + CELLS) + BUFFERS
        found = placed.with_less(found)
        assert found.devices[0].limit == n_bytes * 3 // 4
    # 8 layers and buffers are 846 MiB, three quarters of which hold 5 layers, and so on.
    assert planned == [8, 5, 3, 2, 1, 0]


def test_what_is_left_for_memory() -> None:
    assignment = place_on_cards(cards(card(0.1, 4)), needs(), files(), room(20), asked())
    left = CardPlacement(placed=assignment).left(needs())
    assert left.footprints[0].weights == needs().footprints[0].weights - 4 * LAYER
    assert left.footprints[0].cache == pytest.approx(CACHE * 0.6)
    rest = files().without(assignment.names)
    assert rest.tensor_bytes == left.footprints[0].weights
    assert layer_sizes(rest) == [LAYER] * 6


def test_a_card_that_shares_the_memory_takes_no_more_than_there_is() -> None:
    assert place(cards(card(0.1, 40, shared=True)), room(4)) == (6, (4,))


@given(st.floats(0.01, 100), st.floats(0, 20), st.floats(0, 20), st.floats(1e8, 1e12))
def test_counts_always_add_up(slowness: float, there: float, here: float, rate: float) -> None:
    request = asked(read_rate=rate)
    assignment = place_on_cards(cards(card(slowness, there)), needs(), files(), room(here), request)
    (count,) = assignment.counts
    assert assignment.here + count == LAYERS
    assert 0 <= assignment.lent_bytes + count * CELLS <= (there + 0.1) * (LAYER + CELLS)


def test_a_drafter_goes_to_a_card_that_is_faster_and_has_room() -> None:
    size = Footprint(LAYERS * LAYER, CACHE, BUFFERS)
    fast, slow, small = card(0.1, 20), card(2.0, 20, name="B"), card(0.01, 5, name="C")
    assert drafter_card(cards(slow, fast), files(), size, "auto") == fast
    assert drafter_card(cards(slow, small), files(), size, "auto") is None
    assert drafter_card(cards(slow, fast), files(), size, "B") == slow
    with pytest.raises(MemoryLimitError, match="C has"):
        drafter_card(cards(slow, small), files(), size, "C")
    (_, less) = without(cards(slow, fast), fast, size.total).devices
    assert less.free == fast.free - size.total
    on = CardPlacement(drafter_card=fast, drafter_bytes=size.weights)
    assert on.left(needs(size)).footprints[1] == replace(size, weights=0, cache=0)


def test_measurements_are_kept_by_device(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    profile = card(0.5, 1).profile
    store.put({"device": "CUDA0 a"}, profile)
    assert store.device({"device": "CUDA0 a"}) == profile
    assert store.device({"device": "CUDA0 b"}) is None
    assert profile.bandwidth == pytest.approx(2 * (1 << 24) / 2e-3)
    cannot = replace(profile, unpinned=True)
    store.put({"device": "CUDA0 a"}, cannot)
    assert store.device({"device": "CUDA0 a"}) == cannot
    said = [describe(replace(card(1.0, 4), profile=each)) for each in (profile, cannot)]
    assert [UNPINNED in each for each in said] == [False, True]
    plain, on_card = (
        ProfileKeys.of("t", "d", threads=1, mode="", drafter_device=device) for device in ("", "CUDA0")
    )
    assert plain.passes == on_card.passes
    assert plain.drafts != on_card.drafts


# Layers without their feed-forward weights.

ATTENTION_BYTES = 20 << 20


def divided(context: int = CACHE) -> tuple[ModelFiles, MemoryNeeds]:
    """A model with attention, whose cache takes so many bytes."""
    (header,) = files().headers
    own = tuple(
        TensorInfo(f"blk.{index}.attn_q.weight", (64, 64), 0, 0, ATTENTION_BYTES) for index in range(LAYERS)
    )
    model = ModelFiles((replace(header, tensors=header.tensors + own),))
    return model, MemoryNeeds([Footprint(model.tensor_bytes, context, BUFFERS)], PROCESS, 64)


def spread(found: Cards, request: PlacementRequest, context: int = CACHE) -> tuple[LayerAssignment, int]:
    """The assignment, and how many layers have only their feed-forward weights here."""
    model, sizes = divided(context)
    assignment = place_on_cards(found, sizes, model, room(20), request)
    return assignment, assignment.kept


def test_attention_goes_to_the_card_before_feed_forward_weights() -> None:
    assignment, kept = spread(cards(card(0.1, 6)), asked("attention"))
    free = card_room(card(0.1, 6), needs().footprints[0], room(20))
    left = free - LAYERS * (ATTENTION_BYTES + CELLS) - OUTSIDE
    assert assignment.output
    assert (assignment.here, assignment.counts) == (0, (10,))
    assert kept == LAYERS - left // LAYER
    assert assignment.kept_names == tuple(f"blk.{index}.ffn_up.weight" for index in range(kept))
    assert assignment.lent_bytes == LAYERS * ATTENTION_BYTES + (LAYERS - kept) * LAYER
    assert f"feed-forward weights of {kept}" in assignment.where
    model, sizes = divided()
    rest = model.without(assignment.names)
    left_here = assignment.left(sizes).footprints[0]
    assert (left_here.cache, left_here.weights) == (0, rest.tensor_bytes)
    assert layer_sizes(rest) == [LAYER] * kept


def mixture() -> tuple[ModelFiles, MemoryNeeds]:
    """The same model with 100 experts in each layer, of which a token needs one."""
    model, sizes = divided()
    (header,) = model.headers
    tensors = tuple(
        replace(t, name=t.name.replace("ffn_up", "ffn_up_exps"), shape=(64, 64, 100))
        if "ffn_up" in t.name
        else t
        for t in header.tensors
    )
    return ModelFiles(
        (replace(header, metadata=header.metadata | {"llama.expert_used_count": 1}, tensors=tensors),)
    ), sizes


def test_a_mixture_keeps_experts_here_and_everything_else_on_the_card() -> None:
    model, sizes = mixture()
    assignment = place_on_cards(cards(card(0.1, 4)), sizes, model, room(20), asked())
    assert assignment.counts == (10,)
    assert assignment.kept > 6  # as many experts as whole layers would have left here, and more
    assert {name.split(".")[2] for name in assignment.kept_names} == {"ffn_up_exps"}


def test_whole_layers_are_placed_where_all_bytes_gain_the_same() -> None:
    assert spread(cards(card(0.1, 6)), asked())[1] == 0


def test_attention_stays_where_it_is_computed_faster() -> None:
    assert spread(cards(card(1.0, 6)), asked())[0].counts == (0,)
    slow_link = replace(
        card(0.1, 6), profile=replace(card(0.1, 6).profile, transfer=Curve.through([(1, 1.0)]))
    )
    assert spread(cards(slow_link), asked())[1] == 0


def test_a_split_stays_one_after_a_card_ran_out_of_memory() -> None:
    model, sizes = divided()
    found = cards(card(0.1, 6))
    first = place_models(found, sizes, model, None, room(20), asked("attention"))
    less = place_models(first.with_less(found), sizes, model, None, room(20), asked("attention"))
    assert first.placed is not None
    assert less.placed is not None
    ((_, before),) = first.planned
    ((_, after),) = less.planned
    assert less.placed.counts == first.placed.counts == (LAYERS,)
    assert first.placed.kept < less.placed.kept < LAYERS
    assert before * 3 // 4 - LAYER < after <= before * 3 // 4


def test_attention_of_as_many_layers_as_fit_goes_to_the_card() -> None:
    # A layer's attention and cells take 22 MiB: eight of ten fit in 180 MiB, and nothing of 100 MiB beside.
    assignment, kept = spread(cards(limited(card(0.1, 6), (180 << 20) / (LAYER + CELLS))), asked("attention"))
    assert (assignment.here, assignment.counts, kept) == (2, (8,), 8)
    assert not assignment.output
    assert assignment.lent_bytes == 8 * ATTENTION_BYTES
    assert assignment.where == "2 here, 8 on CUDA0 without the feed-forward weights of 8"
    _, sizes = divided()
    assert assignment.left(sizes).footprints[0].cache == CACHE * 2 // LAYERS
    # With cells of 50 MiB, they take 70 MiB: four fit in 300 MiB, and no feed-forward weights beside them.
    long = 10 * (50 << 20)
    assignment, kept = spread(
        cards(limited(card(0.1, 9), (300 << 20) / (LAYER + CELLS))), asked("attention"), long
    )
    assert (assignment.here, kept) == (6, 4)
    (said,) = CardPlacement(cards(card(0.1, 9)), placed=assignment).shortfall(asked("attention"))
    assert said.startswith("Attention of 4 of 10 layers fits on CUDA0 (")


def test_a_pass_with_attention_of_some_layers_costs_what_is_computed_by_hand() -> None:
    model, sizes = divided()
    found = cards(limited(card(0.1, 6), (180 << 20) / (LAYER + CELLS)))
    assignment = place_on_cards(found, sizes, model, room(20), asked("attention"))
    here = 2 * (ATTENTION_BYTES + LAYER) + 8 * LAYER + OUTSIDE  # with the output
    there = 8 * ATTENTION_BYTES + 8 * CELLS / 2  # after a text of half the context
    attending = 2 * CELLS / 2 * 4 * SECONDS[0]  # of eight rows as long as of four single ones
    trip = found.devices[0].transfer.at(8 * 4 * 4096)
    expected = here * SECONDS[1] + attending + 1.15 * there * 0.1 * SECONDS[1] + 9 * trip
    assert AssignmentCosts(found, model, sizes, room(20), 1e9).seconds(assignment) == pytest.approx(expected)


def test_auto_compares_attention_of_some_layers_with_whole_ones() -> None:
    model, _ = divided()
    for context, split in ((CACHE, False), (10 * (200 << 20), True)):
        sizes = MemoryNeeds([Footprint(model.tensor_bytes, context, BUFFERS)], PROCESS, 64)
        found = cards(limited(card(0.1, 20), 9))
        whole = place_on_cards(found, sizes, model, room(60), asked(9))
        chosen = place_on_cards(found, sizes, model, room(60), asked())
        attention = place_on_cards(found, sizes, model, room(60), asked("attention"))
        costs = AssignmentCosts(found, model, sizes, room(60), 1e9)
        fastest = min((whole, attention), key=costs.seconds)
        assert costs.seconds(chosen) <= 1.06 * costs.seconds(fastest)
        assert bool(chosen.kept) == split


def test_a_card_without_room_for_attention_says_what_it_takes() -> None:
    least = r"Attention and the cache of one layer take 52\.0 MiB with buffers, and CUDA0 has"
    with pytest.raises(MemoryLimitError, match=least):
        spread(cards(card(0.1, 0.1)), asked("attention"))
    nothing, _ = spread(cards(limited(card(0.1, 6), 0.1)), asked("attention"))  # a load ran out of memory
    assert nothing.counts == (0,)


def test_passes_are_predicted_by_what_is_where() -> None:
    found = cards(card(0.1, 6))
    assignment, kept = spread(found, asked("attention"))
    model, _ = divided()
    (part,) = remote_parts(assignment, found, model)
    assert part.trips == 1 + kept
    multiplied = model.tensor_bytes - OUTSIDE  # embeddings are looked up
    assert part.share == pytest.approx(assignment.lent_bytes / multiplied)
    once = replace(part, trips=1).seconds(8, 1.0)
    assert part.seconds(8, 1.0) - once == pytest.approx(
        kept * part.transfer.at(8 * part.row_bytes + part.pass_bytes / 2)
    )
