"""What is predicted of models on graphics cards before they are loaded: the same that loading does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import Config, DevicesConfig
from edgespec.costs.curves import Curve
from edgespec.errors import MemoryLimitError
from edgespec.loading.devices import spreading
from edgespec.loading.devices.card_plan import CardPlan
from edgespec.loading.devices.cards import Card, Cards
from edgespec.loading.devices.finding import PlacementRequest
from edgespec.loading.devices.placed import OnProcessor, Placed
from edgespec.loading.devices.spreading import usual_type
from edgespec.models.gguf.footprint import Footprint, footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning import budget as budget_planning
from edgespec.offload.planning.budget import bytes_needed
from edgespec.plans.model_plan import plan_for
from edgespec.plans.plan import Plan
from edgespec.profiles.device_profile import DeviceProfile
from edgespec.profiles.store import PassProfile, ProfileStore, machine_identity
from edgespec.progress import no_progress

SECONDS = (1e-10, 2e-10, 4e-10)
STEPS = Curve.through([(1, 0.010), (8, 0.012), (32, 0.040)])
THREADS = 1


@pytest.fixture(autouse=True)
def processor_of_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the processor's speed from the cards' profiles alone, not from its measured kernels."""
    monkeypatch.setattr(spreading, "measured_products", lambda type_id: None)


@pytest.fixture(scope="module")
def files(smol_path: Path) -> ModelFiles:
    return ModelFiles.of(read_header(smol_path))


def card(free: int, slowness: float = 0.1) -> Card:
    seconds = tuple(slowness * s for s in SECONDS)
    profile = DeviceProfile(seconds, SECONDS, Curve.through([(1 << 14, 1e-5), (1 << 24, 2e-3)]))
    return Card("CUDA0", "a card", free, free, False, profile)


def size_of(files: ModelFiles) -> Footprint:
    return replace(footprint(files.headers[0], n_cells=1024, n_outputs=64), weights=files.tensor_bytes)


def place(
    files: ModelFiles,
    free: int,
    budget: int,
    drafter: ModelFiles | None = None,
    devices: DevicesConfig | None = None,
) -> Placed:
    cards = Cards.of([card(free)], usual_type(files))
    prints = [size_of(each) for each in (files, drafter) if each is not None]
    request = PlacementRequest(devices or DevicesConfig(), THREADS)
    return CardPlan(cards, files, request, ProfileStore(Path("none"))).place(prints, budget, drafter)


@pytest.mark.parametrize("copies", [False, True])
def test_what_fits_in_the_memory_of_machine_and_card_is_not_streamed(
    files: ModelFiles, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that hold a copy of a tied embedding while layers are streamed, and with others."""
    embedding = max(tensor.n_bytes for tensor in files.headers[0].tensors)
    monkeypatch.setattr(budget_planning, "tied_bytes", lambda _files: embedding * copies)
    whole = bytes_needed([size_of(files)])
    with pytest.raises(MemoryLimitError) as failure:
        OnProcessor(files).place([size_of(files)], 0)
    assert failure.value.least is not None
    budget = (failure.value.least + whole) // 2
    missing = whole - budget
    assert missing > 0
    assert OnProcessor(files).place([size_of(files)], budget).holding.streamed_bytes
    beside = place(files, missing + 2 * size_of(files).total, budget)
    assert not beside.holding.streamed_bytes
    assert beside.passes(STEPS).at(1) < STEPS.at(1)
    assert place(files, missing // 4, budget).holding.streamed_bytes


def test_a_drafter_on_a_card_takes_its_memory_and_is_faster_there(files: ModelFiles) -> None:
    drafter, budget = files, 4 << 30
    enough = place(files, 4 << 30, budget, drafter)
    assert enough.drafter_device == "CUDA0 a card"
    assert enough.notes[0] == "The drafter is on CUDA0."
    assert enough.draft_steps(STEPS).at(1) < STEPS.at(1) / 2
    tight = int(1.2 * size_of(drafter).total)  # for the drafter, and hardly anything else
    alone, beside = place(files, tight, budget), place(files, tight, budget, drafter)
    assert beside.drafter_device
    assert sum(part.share for part in beside.parts) < sum(part.share for part in alone.parts)


def test_a_drafter_stays_on_the_processor_where_the_card_has_no_room_or_is_left_alone(
    files: ModelFiles,
) -> None:
    for free, layers, wanted in ((16 << 20, "auto", "auto"), (4 << 30, 0, "auto"), (4 << 30, "auto", "none")):
        placed = place(files, free, 4 << 30, files, DevicesConfig(gpu_layers=layers, draft_device=wanted))
        assert placed.drafter_device == ""
        assert placed.draft_steps(STEPS) == STEPS
    named = DevicesConfig(gpu_layers=0, draft_device="CUDA0")
    assert place(files, 4 << 30, 4 << 30, files, named).drafter_device


def planned(model: Path, drafter: Path, store: ProfileStore, **more: str) -> Plan:
    header = read_header(model)
    size = {"weight_bytes": header.tensor_bytes, "parameters": 1 << 27}
    key = machine_identity() | {"threads": str(THREADS), "model": header.fingerprint, "mode": "test"}
    store.put(key, PassProfile(STEPS, **size))
    for tensor in read_header(drafter).tensors:  # steps are derived from how fast the processor multiplies
        speed = {"threads": str(THREADS), "type": str(tensor.type_id)}
        store.put_products(machine_identity() | speed, SECONDS)
    pair = {"model": model, "draft": drafter, "memory": 4 << 30, "context": 512, "threads": THREADS}
    cards = Cards.of([card(4 << 30)], usual_type(ModelFiles.of(header)))
    return plan_for(Config.of(**(pair | more)), no_progress, store, cards)


def test_a_plan_counts_the_drafter_where_loading_puts_it(
    smol_path: Path, q4_drafter_path: Path, tmp_path: Path
) -> None:
    there = planned(smol_path, q4_drafter_path, ProfileStore(tmp_path))
    here = planned(smol_path, q4_drafter_path, ProfileStore(tmp_path), draft_device="none")
    (on_card,), (on_processor,) = (
        [size for size in plan.sizes if size.drafter == q4_drafter_path.name and size.nodes == 8]
        for plan in (there, here)
    )
    assert on_card.draft_s < on_processor.draft_s / 2
    assert on_card.holding.needed < on_processor.holding.needed
    assert "The drafter is on CUDA0." in there.notes
    assert "The drafter is on CUDA0." not in here.notes
