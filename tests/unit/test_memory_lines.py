"""The lines of a plan's memory: each part once, and all of them together."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings

from edgespec.config import Config
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.images.facts import ProjectorFacts
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.weightless import ModelShape, hollow_files
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.memory.needs import BESIDE_STREAM_ROWS, MAX_PROMPT_ROWS
from edgespec.planning.planner import Planner
from edgespec.planning.report.memory_lines import UNUSED, memory_lines
from edgespec.profiles.store import ProfileStore
from tests.unit.test_plan import Case, cases

MIB = 1 << 20
LARGE = ModelShape("qwen2", 28, 1536, 97_024, 12, 2)
SMALL = ModelShape("qwen2", 24, 896, 4864, 14, 2, head=64)


def planner(memory: int, **options: object) -> Planner:
    machine = MachineSnapshot(FreeMemory(memory * MIB), 2, own_kernels=True)
    return Planner(hollow_files("large", LARGE), Config.of(context=2048, **options), machine, ProfileStore())


@settings(deadline=None)
@given(cases())
def test_the_lines_add_up_to_the_budget(case: Case) -> None:
    try:
        plan = case.planner.plan(case.drafter)
    except (MemoryLimitError, BackendError):
        return
    if plan.memory.paged:
        return
    lines = memory_lines(plan)
    assert all(n_bytes > 0 for n_bytes in lines.values())
    assert sum(lines.values()) == plan.memory.budget
    taken = plan.memory.budget - lines.get(UNUSED, 0)
    layout = plan.memory.layout
    event("streamed" if layout else "in memory")
    if layout is not None:
        assert taken == layout.placement.n_bytes
    elif plan.assignment is None and plan.machine.cards is None:
        assert taken == plan.needs.total


def test_tables_and_long_pieces_of_prompts_take_no_memory_from_a_streamed_target() -> None:
    drafter = hollow_files("small", SMALL)
    plan = planner(4000).plan(drafter)
    lines = memory_lines(plan)
    (table,) = drafter.tables
    assert lines["drafter's weights"] == drafter.tensor_bytes - table.n_bytes
    assert plan.needs.drafter_rows == BESIDE_STREAM_ROWS
    assert lines["interpreter and libraries"] > 0
    in_memory = planner(16_000).plan(drafter)
    assert in_memory.needs.drafter_rows == MAX_PROMPT_ROWS
    assert memory_lines(in_memory)["drafter's weights"] == (drafter.tensor_bytes)


def test_a_draft_step_needs_logits_for_its_nodes_only() -> None:
    drafter = hollow_files("small", SMALL)

    def logits(planner: Planner) -> int:
        return planner.plan(drafter).needs.footprints[1].buffers

    usual = logits(planner(4000))
    assert logits(planner(4000, tree_width=64)) - usual > 48 * 4 * SMALL.vocabulary
    assert logits(planner(4000, parallel=24)) > usual
    assert logits(replace(planner(4000), usual_nodes=256)) > usual


def test_a_projector_that_is_used_for_sure_takes_memory_from_the_weights() -> None:
    projector = ProjectorFacts("mmproj.gguf", 300 * MIB, "gemma3", 256)
    without = planner(2000)
    plans = [without.plan(), replace(without, projector=projector).plan()]
    assert all(plan.streams for plan in plans)
    lines = [memory_lines(plan) for plan in plans]
    assert "reading of an image" not in lines[0]
    assert lines[1]["reading of an image"] == projector.reading_bytes
    assert plans[0].holding.resident_bytes - plans[1].holding.resident_bytes > 300 * MIB
    assert [projector.reserved in plan.notes for plan in plans] == [False, True]
