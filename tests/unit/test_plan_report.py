"""A plan's figures agree: of simulated machines, as a person or a script reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from edgespec.base.progress import no_progress
from edgespec.base.units import parse_size, significant
from edgespec.cli.screen.plan_tables import plan_table
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.files.user_folders import cache_folder
from edgespec.models.hub.inspection import InspectedModel
from edgespec.planning.drafter import FoundDrafter
from edgespec.planning.planner import Planner
from edgespec.planning.report.predictions import report_on
from edgespec.planning.report.report import PlanReport
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key, machine_identity
from tests.unit.test_plan import F32, Q4_0, Q4_K, Q6_K, Q8_0, Case, cases


def check(plan: PlanReport) -> None:
    """Find no contradiction in what is printed, within the record, and between the two."""
    record, text = plan.to_json(), plan_table(plan, verbose=True)
    rows = {cells[0]: cells for line in text.splitlines() if (cells := re.split(r"  +", line))}
    ways: dict[str, dict[str, Any]] = {kind: record[kind] for kind in ("plain", "prose", "code")}
    for kind, way in ways.items():
        shown = plan.ways[kind]
        assert rows[kind][1:4] == [
            significant(shown.tokens_per_second),
            f"{shown.tokens_per_pass:.2f}",
            str(way["tree_budget"]),
        ]
        assert way["tokens_per_second"] == round(shown.tokens_per_second, 6)
        spans = (re.fullmatch(r"([\d.]+) s", cell) for cell in rows[kind])
        assert all(float(span[1]) <= 90 for span in spans if span)
    assert ways["prose"]["tokens_per_second"] == max(size["tokens_per_second"] for size in record["sizes"])
    assert ways["code"]["tokens_per_second"] >= ways["prose"]["tokens_per_second"], "code agrees more often"
    assert ways["plain"]["tree_budget"] == 1
    assert {size["drafter"] for size in record["sizes"]} == {record["drafter"]}
    assert rows["drafter"][1] == record["drafter"]
    assert ("exact" in rows) == (record["exact"] is True)
    assert sum(record["memory"].values()) >= ways["prose"]["resident_bytes"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ProfileStore:
    """All that plans would measure of this machine."""
    store = ProfileStore(tmp_path_factory.mktemp("profiles"))
    for threads in range(1, 9):
        key = machine_identity() | {"threads": str(threads)}
        for type_id in (F32, Q4_0, Q8_0, Q4_K, Q6_K):
            store.put_products(key | {"type": str(type_id)}, (1e-10, 2e-10, 4e-10))
    return store


def reported(case: Case, store: ProfileStore, named: bool) -> PlanReport:
    planner = Planner(case.target, case.config, case.machine, store)
    model = InspectedModel(case.target.headers, None, None)
    return report_on(model, planner, lambda _: FoundDrafter(case.drafter, named=named), no_progress)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(["auto", "lookup", "none"]), st.booleans())
def test_plans_of_simulated_machines_contradict_themselves_nowhere(
    store: ProfileStore, case: Case, draft: str, named: bool
) -> None:
    cache = cache_folder()
    while not cache.exists():
        cache = cache.parent
    store.put(disk_key(cache), DiskProfile(1e9, 1e9, 1 << 20, 1))
    asked = Case(
        case.target, case.drafter, case.config.with_(draft="d" if case.drafter else draft), case.machine
    )
    try:
        plan = reported(asked, store, named)
    except BackendError:
        event("cannot be streamed")
        return
    except MemoryLimitError as error:
        size = re.search(r" needs ([\d.]+ \w+) of memory", error.what)
        if size is None:
            event("no memory helps")
            return
        event("refused")
        n_bytes = parse_size(size[1])
        free = type(case.machine.free)(max(n_bytes, case.machine.free.available))
        machine = type(case.machine)(**{**vars(case.machine), "free": free})
        again = Case(case.target, case.drafter, asked.config.with_(memory=n_bytes), machine)
        try:
            plan = reported(again, store, named)
        except BackendError:
            event("cannot be streamed with any memory")
            return
        assert plan.chosen.holding.budget >= n_bytes
    event("streamed" if plan.chosen.holding.streamed_bytes else "in memory")
    check(plan)
