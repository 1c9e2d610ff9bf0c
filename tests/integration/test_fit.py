"""Predictions of what fits agree with loading."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.base.units import readable
from edgespec.config import Config
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.inspection import inspect_model
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.memory.fit import fit_report
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileStore

CONTEXT = 256


@pytest.mark.slow
def test_a_verdict_holds_when_the_model_is_loaded(q4_drafter_path: Path) -> None:
    _check_in_a_child(_check_verdicts, q4_drafter_path)


def _check_in_a_child(check: Callable[[Path], None], path: Path) -> None:
    """Check in a process of its own: what earlier tests left in this one's memory counts as needed."""
    child = multiprocessing.get_context("spawn").Process(target=check, args=(path,))
    child.start()
    child.join()
    assert child.exitcode == 0


def _check_verdicts(path: Path) -> None:
    headers = inspect_model(str(path)).headers
    with pytest.raises(MemoryLimitError) as refused:
        edgespec.load(path, memory=1 << 20, context=CONTEXT, draft="none")
    too_little = refused.value.least - 1
    with pytest.raises(MemoryLimitError):
        edgespec.load(path, memory=too_little, context=CONTEXT, draft="none")
    assert fit_report(headers, budget=too_little, context=CONTEXT)["verdict"] == "too large"

    # Headers give estimates, loading measures: a verdict never promises what loading cannot keep.
    memory = fit_report(headers, context=CONTEXT)
    least, needed = memory["least_bytes"], memory["needed_bytes"]
    assert memory["verdict"] == "fits"
    assert too_little < least < needed
    for budget, verdict in ((least, "streams"), ((least + needed) // 2, "streams"), (needed, "fits")):
        said = fit_report(headers, budget=budget, context=CONTEXT)
        assert said["verdict"] == verdict
        assert (said["least_bytes"], said["needed_bytes"]) == (least, needed)
        with edgespec.load(path, memory=budget, context=CONTEXT, draft="none") as engine:
            streamed = getattr(engine.target.model.weights, "streamed_bytes", 0)
        assert streamed == 0 or verdict == "streams"
        assert streamed <= said["streamed_bytes_per_pass"]


@pytest.mark.slow
def test_a_load_streams_what_its_plan_says(wide_path: Path) -> None:
    _check_in_a_child(_check_plan, wide_path)


def _check_plan(path: Path) -> None:
    headers = inspect_model(str(path)).headers
    budget = fit_report(headers, context=CONTEXT)["least_bytes"]
    config = Config.of(context=CONTEXT, draft="none", memory=budget)
    plan = Planner(ModelFiles(headers), config, MachineSnapshot.read(), ProfileStore(), measured=True).plan()
    assert plan.streams
    with edgespec.load(path, memory=budget, context=CONTEXT, draft="none") as engine:
        assert engine.memory.streamed_bytes_per_pass == plan.holding.streamed_bytes
        assert engine.memory.budget_bytes == budget == plan.memory.budget
        assert engine.target.context.n_rows == plan.needs.rows
        assert (engine.target.rule is not None) == plan.exact


def test_memory_that_is_not_there_is_named_when_less_is_taken(q4_drafter_path: Path) -> None:
    asked = psutil.virtual_memory().total * 2
    with edgespec.load(q4_drafter_path, memory=asked, context=CONTEXT, draft="none") as engine:
        (note,) = engine.warnings

    assert readable(asked) in note
    assert note.count("iB") == 2
    with edgespec.load(q4_drafter_path, memory=1 << 30, context=CONTEXT, draft="none") as engine:
        assert engine.warnings == []
