"""A plan's figures, sentences and tables agree, read as a person or a script reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from edgespec.cli.commands.plan import plan_report
from edgespec.costs.batches import SIZES, SequenceCells, predict_batch
from edgespec.costs.curves import Curve
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import (
    DraftingCosts,
    PlanComparison,
    TargetPasses,
    alternatives,
    best,
    possible_changes,
)
from edgespec.costs.yields import expected_yields
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.files.user_folders import cache_folder
from edgespec.kernels.layouts import kernel_layouts
from edgespec.models.hub.inspection import InspectedModel
from edgespec.planning.drafter import FoundDrafter
from edgespec.planning.plan import Planner
from edgespec.planning.report.memory_lines import MemoryLine
from edgespec.planning.report.predictions import report_on
from edgespec.planning.report.report import BatchPlan, PlanReport
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key, machine_identity
from edgespec.progress import no_progress
from edgespec.units import parse_size, significant
from tests.unit.test_plan import F32, Q4_0, Q4_K, Q6_K, Q8_0, Case, cases

GB = 1_000_000_000

seconds = st.floats(1e-4, 10)
curves = st.lists(seconds, min_size=4, max_size=4).map(
    lambda times: Curve.through(zip((1, 8, 32, 64), times, strict=True))
)
drafters = st.lists(st.tuples(st.floats(0.01, 0.99), curves), max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> PlanReport:
    """Plans for random costs, acceptances, memory and numbers of drafters, of which the first is loaded."""
    whole = draw(st.integers(1, 40)) * GB
    passes = TargetPasses(
        draw(curves), read_rate=draw(st.floats(1e8, 1e10)), overlap=draw(st.floats(1.5, 16))
    )

    def holding(beside: int) -> PlannedWeights:
        budget = draw(st.integers(1, 40)) * GB
        resident = min(max(budget - beside, GB // 2), whole)
        return PlannedWeights(budget, whole + beside, resident, whole - resident, GB // 20, 2)

    alone = holding(0)
    (plain,) = alternatives(alone, passes, DraftingCosts("none"), 60)
    found = [
        (DraftingCosts(f"drafter{number}", expected_yields(agreement), step), holding(GB))
        for number, (agreement, step) in enumerate(draw(drafters))
    ]
    most = draw(st.integers(2, 128))
    taken, beside = found[0] if found else (DraftingCosts("none"), alone)
    sizes = tuple(alternatives(beside, passes, taken, most))
    others = tuple(best(alternatives(where, passes, other, most)[1:]) for other, where in found[1:])
    changes = possible_changes(
        best(sizes),
        passes,
        taken,
        most,
        [("1.0 GiB more memory", alone)],
        drafter_elsewhere=draw(st.booleans()),
    )
    batch = [
        predict_batch(alone, passes, sequences) for sequences in SIZES[: draw(st.integers(1, len(SIZES)))]
    ]
    return PlanReport(
        "a-model",
        PlanComparison(sizes, plain, others, changes),
        BatchPlan(SequenceCells(1000, 512), batch[-1].sequences, batch),
        drafter=taken.name,
        exact=draw(st.sampled_from([None, True, False])),
        memory=[MemoryLine("target's layers that stay", 3 * GB), MemoryLine("unused", 5 << 20)],
    )


@dataclass
class Read:
    """A plan as it is printed: its facts, tables by the first heading, and the advice in percent."""

    facts: dict[str, str]
    tables: dict[str, list[list[str]]]
    advice: dict[str, int]

    @classmethod
    def of(cls, text: str) -> Read:
        first, *parts = text.strip().split("\n\n")
        facts = dict(re.split(r"  +", line, maxsplit=1) for line in first.splitlines())
        tables, advice = {}, {}
        for part in parts:
            title, *lines = part.splitlines()
            if title == "What would help:":
                found = (re.fullmatch(r"  (.+): \+(\d+)%", line) for line in lines)
                advice = {match[1]: int(match[2]) for match in found if match}
                assert len(advice) == len(lines)
            elif title.isupper() or title.startswith("WITH --draft"):
                tables[re.split(r"  +", title)[0]] = [re.split(r"  +", line) for line in lines]
        return cls(facts, tables, advice)


def rate_of(said: str) -> float:
    """Tokens per second of a speed that is printed."""
    if "per token" not in said:
        return float(said.removeprefix("about ").split()[0])
    units = {"s": 1, "min": 60, "h": 3600}
    return 1 / sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (s|min|h)\b", said))


@given(plans())
def test_what_takes_the_memory_is_listed_when_details_are_wanted(plan: PlanReport) -> None:
    listed = Read.of(plan_report(plan, verbose=True)).tables["MEMORY"]
    assert listed == [["target's layers that stay", "2.8 GiB"], ["unused", "5.0 MiB"]]
    assert "MEMORY" not in Read.of(plan_report(plan)).tables
    assert plan.to_json()["memory"][1] == {"what": "unused", "bytes": 5 << 20}


def check(plan: PlanReport) -> None:
    """Find no contradiction in what is printed, within the record, and between the two."""
    read, record = Read.of(plan_report(plan)), plan.to_json()
    speed = read.facts["speed"].removeprefix("about ")
    # The record is rounded; what is printed is not made from it.
    _check_trees(read, record, speed, plan.comparison.plain.tokens_per_second)
    assert record["ways"] == [record["chosen"], *record["alternatives"]]
    _check_alternatives(read, record)
    _check_bottleneck(read, record)
    _check_batch(read, record)
    assert read.facts["drafter"] == record["drafter"]
    assert ("exact" in read.facts) == (record["exact"] is True)
    assert read.facts["threads"] == str(record["threads"])


def _check_trees(read: Read, record: dict[str, Any], speed: str, plain: float) -> None:
    chosen, sizes = record["chosen"], record["sizes"]
    assert chosen in sizes
    assert chosen["tokens_per_second"] == max(size["tokens_per_second"] for size in sizes)
    assert {size["drafter"] for size in sizes} == {record["drafter"]}
    trees = read.tables.get("ALL TREES", [])
    assert len(trees) == (len(sizes) if len(sizes) > 1 else 0)
    if trees:
        nodes = re.match(r"(\d+) nodes", read.facts["tree"])
        (row,) = (row for row in trees if row[1] == (nodes[1] if nodes else "1"))
        assert is_cell_of(row[2], speed)
        assert float(row[2]) == max(float(other[2]) for other in trees)
        assert {row[0] for row in trees} == {read.facts["drafter"]}
    if "without drafts" not in read.facts:
        assert is_cell_of(significant(plain), speed)
        return
    match = re.fullmatch(r"(.+); with them ([\d.]+) times that", read.facts["without drafts"])
    assert match is not None
    assert is_cell_of(significant(plain), match[1])
    assert float(match[2]) == pytest.approx(rate_of(speed) / rate_of(match[1]), rel=0.12, abs=0.006)


def _check_alternatives(read: Read, record: dict[str, Any]) -> None:
    rows = read.tables.get("WITH --draft", [])
    assert [row[0] for row in rows] == [way["drafter"] for way in record["alternatives"]]
    advised = {change["what"]: change["gain"] for change in record["advice"]}
    for way, row in zip(record["alternatives"], rows, strict=True):
        assert float(row[2]) == pytest.approx(way["tokens_per_second"], rel=0.15, abs=0.002)
        what = "--draft none" if way["drafter"] == "none" else f"{way['drafter']} as drafter (--draft)"
        gain = way["tokens_per_second"] / record["chosen"]["tokens_per_second"] - 1
        if gain > 0.06:
            assert advised[what] == pytest.approx(gain, rel=0.01, abs=0.01)
        elif gain < 0.04:
            assert what not in advised


def _check_bottleneck(read: Read, record: dict[str, Any]) -> None:
    names = {"disk": "the disk: ", "compute": "the processor: ", "drafter": "the drafter's device: "}
    bottleneck = record["bottleneck"]
    said = read.facts["bottleneck"].removeprefix(names[bottleneck["resource"]])
    match = re.fullmatch(r"(.+) would give (\d+)% more", said)
    assert match is not None
    assert match[1] == bottleneck["what"]
    gains = {change["what"]: change["gain"] for change in record["advice"]}
    resources = [change["gain"] for change in record["advice"] if change["resource"]]
    assert bottleneck["gain"] >= max(resources, default=0)
    assert list(gains) == list(read.advice)
    assert sorted(read.advice.values(), reverse=True) == list(read.advice.values())
    if match[1] in read.advice:
        assert read.advice[match[1]] == int(match[2])
    else:
        assert int(match[2]) <= 5
    for what, percent in read.advice.items():
        assert percent == pytest.approx(100 * gains[what], abs=0.6)


def _check_batch(read: Read, record: dict[str, Any]) -> None:
    rows = {int(row[0]): row for row in read.tables["SEQUENCES AT ONCE, NO DRAFTS"]}
    match = re.fullmatch(
        r"(?:about )?(.+) with (\d+) sequences? at once(?:; (\d+) are nearly as fast \((.+)\))?",
        read.facts["a batch"],
    )
    assert match is not None
    assert is_cell_of(rows[int(match[2])][1], match[1])
    assert float(rows[int(match[2])][1]) == max(float(row[1]) for row in rows.values())
    if match[3]:
        assert is_cell_of(rows[int(match[3])][1], match[4])
        assert rate_of(match[4]) <= rate_of(match[1])
    batch = record["batch"]
    alone = batch["sizes"][0]
    assert alone["pass_s"] == record["plain"]["pass_s"]
    assert alone["tokens_per_second"] <= record["plain"]["tokens_per_second"], "its prompt counts"
    assert batch["fastest"]["tokens_per_second"] == max(size["tokens_per_second"] for size in batch["sizes"])
    assert [size["texts"] for size in batch["sizes"]] == list(rows)
    (room,) = re.findall(r"room for (\d+) sequences? of", read.facts["KV cache per token"])
    assert int(room) == batch["most_texts"] >= max(rows)
    assert all(size in rows for size in SIZES if size <= int(room))


def is_cell_of(cell: str, said: str) -> bool:
    """True if a cell of tokens per second agrees with a speed that is printed beside the table."""
    if said.endswith(" tokens/s"):
        return cell == said.removesuffix(" tokens/s")
    return float(cell) == pytest.approx(rate_of(said), rel=0.05)  # the time of a token has two digits


@given(plans())
def test_tables_have_times_that_people_read(plan: PlanReport) -> None:
    """Whatever the speed, a column of tokens per second has numbers, and no time has more than 90 seconds."""
    for rows in Read.of(plan_report(plan)).tables.values():
        for cell in (cell for row in rows for cell in row):
            assert "per token" not in cell
            seconds = re.fullmatch(r"([\d.]+) s", cell)
            assert seconds is None or float(seconds[1]) <= 90


@given(plans())
def test_figures_and_sentences_agree_whatever_the_costs(plan: PlanReport) -> None:
    check(plan)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ProfileStore:
    """All that plans would measure of this machine."""
    store = ProfileStore(tmp_path_factory.mktemp("profiles"))
    for threads in range(1, 9):
        key = machine_identity() | {"threads": str(threads)}
        for type_id in (F32, Q4_0, Q8_0, Q4_K, Q6_K):
            store.put_products(key | {"type": str(type_id)}, (1e-10, 2e-10, 4e-10))
        store.put_attention(key | {"kernels": " ".join(layout.name for layout in kernel_layouts())}, 1e-10)
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
