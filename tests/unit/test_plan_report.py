"""A plan's choice, its sentences and its tables say the same, whatever the costs."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.commands.plan import plan_report
from edgespec.costs.batches import SequenceCells, predict_batch
from edgespec.costs.curves import Curve
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import DraftingCosts, PlanComparison, TargetPasses, alternatives
from edgespec.costs.yields import expected_yields
from edgespec.plans.report import BatchPlan, PlanReport

GB = 1_000_000_000

seconds = st.floats(1e-4, 10)
curves = st.lists(seconds, min_size=4, max_size=4).map(
    lambda times: Curve.through(zip((1, 8, 32, 64), times, strict=True))
)
drafters = st.lists(st.tuples(st.floats(0.01, 0.99), curves), max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> PlanReport:
    """Plans for random costs, acceptances, memory and numbers of drafters."""
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
    trees = []
    for number, (agreement, step) in enumerate(draw(drafters)):
        drafting = DraftingCosts(f"drafter{number}", expected_yields(agreement), step)
        most = draw(st.integers(1, 128))
        trees.append(tuple(alternatives(holding(GB), passes, drafting, most)[1:]))
    size = predict_batch(alone, passes, 1)
    batch = BatchPlan(SequenceCells(1000, 512), 1, size, [size])
    return PlanReport("a-model", PlanComparison(plain, tuple(trees)), [], batch)


def tables(report: str) -> dict[str, list[tuple[str, int, float]]]:
    """Each table with trees, by its title: names, nodes and tokens per second."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for part in report.strip().split("\n\n"):
        title, *lines = part.splitlines()
        if " NODES " in title:
            rows = (line.split() for line in lines)
            found[title.partition("  ")[0]] = [(row[0], int(row[1]), float(row[2])) for row in rows]
    return found


@given(plans())
def test_the_stated_best_is_the_fastest_of_the_listed_rows(plan: PlanReport) -> None:
    report = plan_report(plan)
    listed = tables(report)
    (speed,) = re.findall(r"^speed +([\d.]+) tokens/s$", report, re.MULTILINE)
    (drafter,) = re.findall(r"^drafter +(\w+)", report, re.MULTILINE)
    for rows in listed.values():
        assert float(speed) == max(row[2] for row in rows)
        assert any(row[0] == drafter and row[2] == float(speed) for row in rows)
    by_drafter = listed.get("DRAFTER, BEST TREE", [])
    assert len(by_drafter) == (len(plan.ways) if len(plan.ways) > 1 else 0)
    if "plain decoding is the fastest" in report:
        assert max(by_drafter, key=lambda row: row[2])[2] == round(plan.plain.tokens_per_second, 2)
        assert drafter == "none"
    if drafter != "none":
        (nodes,) = re.findall(r"^tree +(\d+) nodes", report, re.MULTILINE)
        assert (drafter, int(nodes), float(speed)) in listed["ALL TREES"]
        (plain,) = re.findall(r"^plain decoding +([\d.]+) tokens/s", report, re.MULTILINE)
        assert ("none", 1, float(plain)) in listed["ALL TREES"]


@given(plans())
def test_scripts_see_the_same_choice(plan: PlanReport) -> None:
    record = plan.to_json()
    fastest = max(size["tokens_per_second"] for size in record["sizes"])
    assert record["chosen"]["tokens_per_second"] == fastest == record["ways"][0]["tokens_per_second"]
    assert record["chosen"] in record["sizes"]
    assert record["plain"] in record["ways"]
    assert record["drafter"] in [way["drafter"] for way in record["ways"]]
