"""Refusals for want of memory name a size that suffices, whichever command refuses and is then run.

Only real models are loaded, so only they show that what was planned suffices.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.base.progress import no_progress
from edgespec.base.units import parse_size
from edgespec.cli.main import main
from edgespec.config import Config
from edgespec.errors import MemoryLimitError
from edgespec.generation.config import GenerationConfig
from edgespec.machine.cores import default_threads
from edgespec.models.gguf.header import read_header
from edgespec.planning.report.model_report import plan_for
from edgespec.planning.report.report import PlanReport
from edgespec.profiles.store import ProfileStore, machine_identity

PAIRS: dict[str, dict[str, Any]] = {
    "alone": {"draft": "none", "offload": "stream"},
    "in memory": {"draft": "lookup", "offload": "none"},
    "with a drafter": {"draft": "drafter"},
    "many sequences, as serve": {"draft": "lookup", "parallel": 8},
}


def named_size(error: str) -> str:
    (size,) = re.findall(r" needs ([\d.]+ [KMG]iB) of memory", error)
    return str(size)


def planned(model: Path, **options: Any) -> PlanReport:
    return plan_for(Config.of(model=model, **options), no_progress)


@pytest.fixture(autouse=True)
def speeds_are_known(own_environment: None, short_path: Path, q4_drafter_path: Path) -> None:
    """Nothing has to be measured for a plan."""
    store = ProfileStore()
    machine = machine_identity() | {"threads": str(default_threads())}
    for tensor in (*read_header(short_path).tensors, *read_header(q4_drafter_path).tensors):
        store.put_products(machine | {"type": str(tensor.type_id)}, (1e-10, 2e-10, 4e-10))


@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
def test_the_size_that_a_refusal_names_suffices(
    options: dict[str, Any], short_path: Path, q4_drafter_path: Path
) -> None:
    pair = {**options, "context": 128}
    if options["draft"] != "none":
        pair["tree_budget"] = 8
    if options["draft"] == "drafter":
        pair["draft"] = q4_drafter_path
    refused = []
    for attempt in (
        edgespec.load,
        lambda model, **more: plan_for(Config.of(model=model, **more), no_progress),
    ):
        with pytest.raises(MemoryLimitError) as caught:
            attempt(short_path, memory="1MiB", **pair)
        refused.append(named_size(caught.value.what))
    assert refused[0] == refused[1], "plan and load name the same size"
    alone = re.findall(r"Without the drafter, (.*?) are enough: draft='lookup'\.", caught.value.hint)
    assert bool(alone) == (options["draft"] == "drafter")
    if alone:
        assert f"{short_path.name} with the drafter {q4_drafter_path.name} and a " in caught.value.what
        assert parse_size(alone[0]) < parse_size(refused[0])
        planned(short_path, memory=alone[0], **pair | {"draft": "lookup"})
    plan = plan_for(Config.of(model=short_path, memory=refused[0], **pair), no_progress)
    with edgespec.load(short_path, memory=refused[0], **pair) as engine:
        answer = engine.generate("one two three", GenerationConfig(max_tokens=4), raw=True)
        assert answer.tokens
        assert engine.memory.streamed_bytes_per_pass == plan.chosen.holding.streamed_bytes
        assert engine.target.context.n_threads == plan.threads
        assert answer.exact or not plan.exact
        assert plan.drafter in {
            "none": ("none",),
            "lookup": ("prompt lookup",),
        }.get(str(pair["draft"]), (q4_drafter_path.name,))


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_command_that_was_refused_succeeds_with_what_it_names(
    command: str, short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(short_path), "--context", "128", "--draft", "none"]
    arguments += ["-p", "Hi", "--max-tokens", "4"] if command == "generate" else []
    assert main([*arguments, "--memory", "1MiB"]) == 1
    size = named_size(capsys.readouterr().err)
    assert main([*arguments, "--memory", size.replace(" ", "")]) == 0
