"""Predictions for models on graphics cards before they are loaded agree with loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.planner import TargetPasses
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices import assignment
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.memory import budget as budget_planning
from edgespec.planning.memory import stream_layout
from edgespec.planning.memory.budget import least_budget
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Planner
from edgespec.planning.report.model_report import plan_for
from edgespec.planning.report.report import PlanReport
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import PassProfile, ProfileStore, machine_identity

SECONDS = (1e-10, 2e-10, 4e-10)
STEPS = Curve.through([(1, 0.010), (8, 0.012), (32, 0.040)])
THREADS = 1


@pytest.fixture(autouse=True)
def processor_of_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the processor's speed from the cards' profiles alone, not from its measured kernels."""
    monkeypatch.setattr(assignment, "measured_products", lambda type_id: None)


@pytest.fixture(scope="module")
def files(smol_path: Path) -> ModelFiles:
    return ModelFiles.of(read_header(smol_path))


def card(free: int, slowness: float = 0.1) -> Card:
    seconds = tuple(slowness * s for s in SECONDS)
    profile = DeviceProfile(seconds, SECONDS, Curve.through([(1 << 14, 1e-5), (1 << 24, 2e-3)]))
    return Card("CUDA0", "a card", free, free, False, profile)


def planner(files: ModelFiles, cards: Cards | None = None, **options: Any) -> Planner:
    machine = MachineSnapshot(FreeMemory(64 << 30), THREADS, cards)
    return Planner(files, Config.of(context=512, **options), machine, ProfileStore(Path("none")))


def place(
    files: ModelFiles, free: int, budget: int, drafter: ModelFiles | None = None, **options: Any
) -> Plan:
    there = planner(files, Cards.of([card(free)], usual_type(files)), **options)
    return there.place(there.needs(drafter), drafter, budget=budget)


@pytest.mark.parametrize("copies", [False, True])
def test_what_fits_in_the_memory_of_machine_and_card_is_not_streamed(
    files: ModelFiles, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that hold a copy of a tied embedding while layers are streamed, and with others."""
    embedding = max(tensor.n_bytes for tensor in files.headers[0].tensors)
    for module in (stream_layout, budget_planning):
        monkeypatch.setattr(module, "tied_bytes", lambda _files: embedding * copies)
    here = planner(files)
    needs = here.needs()
    least = least_budget(needs, files, here.config)
    budget = (least + needs.total) // 2
    missing = needs.total - budget
    assert missing > 0
    assert here.place(needs, budget=budget).streams
    beside = place(files, missing + 2 * needs.footprints[0].total, budget)
    assert not beside.streams
    assert curve(beside).at(1) < STEPS.at(1)
    assert place(files, missing // 4, budget).streams


def curve(plan: Plan) -> Curve:
    return plan.over(TargetPasses(STEPS)).compute


def test_a_drafter_on_a_card_takes_its_memory_and_is_faster_there(files: ModelFiles) -> None:
    drafter, budget = files, 4 << 30
    enough = place(files, 4 << 30, budget, drafter)
    assert enough.on_cards.drafter_name == "CUDA0 a card"
    assert enough.notes[0] == "The drafter is on CUDA0."
    assert enough.draft_steps(STEPS).at(1) < STEPS.at(1) / 2
    tight = int(
        1.2 * planner(files).needs(drafter).footprints[1].total
    )  # for the drafter, and hardly anything else
    alone, beside = place(files, tight, budget), place(files, tight, budget, drafter)
    assert beside.on_cards.drafter_name
    assert sum(part.share for part in beside.parts) < sum(part.share for part in alone.parts)


def test_a_drafter_stays_on_the_processor_where_the_card_has_no_room_or_is_left_alone(
    files: ModelFiles,
) -> None:
    for free, layers, wanted in ((16 << 20, "auto", "auto"), (4 << 30, 0, "auto"), (4 << 30, "auto", "none")):
        plan = place(files, free, 4 << 30, files, gpu_layers=layers, draft_device=wanted)
        assert plan.on_cards.drafter_name == ""
        assert plan.draft_steps(STEPS) == STEPS
    named = place(files, 4 << 30, 4 << 30, files, gpu_layers=0, draft_device="CUDA0")
    assert named.on_cards.drafter_name


def planned(model: Path, drafter: Path, store: ProfileStore, **more: str) -> PlanReport:
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


@pytest.mark.slow
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
