"""`edgespec profile` and `edgespec plan` on the real small model, in memory and streamed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.cli.removal import plan_removal
from edgespec.costs.yields import BUDGETS
from edgespec.generation.config import GenerationConfig
from edgespec.offload.weights import StreamedWeights
from edgespec.profiles.store import ProfileStore, disk_key
from tests.busy import busy_machine
from tests.least_memory import least_memory
from tests.program import run_captured as run

pytestmark = pytest.mark.usefixtures("at_a_desk", "own_profiles")


@pytest.mark.slow
def test_a_profile_is_measured_kept_and_planned_with(
    smol_path: Path, q4_drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(smol_path), "--draft", str(q4_drafter_path), "--context", "256"]
    code, out, _ = run(capsys, "plan", *pair, "--memory", "4GB", "--json")
    before = json.loads(out)
    assert (code, before["uncertain"]) == (0, True)
    assert any("derived" in note for note in before["notes"])
    with_drafter = before["prose"]
    assert with_drafter["drafter"] == before["drafter"] == q4_drafter_path.name
    # Between the least that streaming needs and what all of it needs; both depend on the processor.
    least = least_memory(smol_path, draft=q4_drafter_path, context=256)
    memory = str(max(least + 2_000_000, with_drafter["needed_bytes"] - 30_000_000))

    code, out, error = run(capsys, "profile", *pair, "--memory", memory, "--seconds", "2", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["exact"] is True
    assert found["streamed_bytes_per_pass"] > 0
    assert found["passes"]["read_rate"] > 0
    rows = [row for row, _ in found["passes"]["compute"]]
    assert rows[0] == 1
    assert len(rows) > 1, "how many more there are is a question of time, and of what is exact here"
    assert found["disk"]["direct"] + found["disk"]["buffered"] > 0
    assert found["memory_bandwidth"] > 1e8
    tokens = [float(t) for t in found["greedy"]["tokens"].values()]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 1.5, "this drafter agrees with its target on 3 of 4 tokens"
    assert found["sampled"]["passes"] > 0
    assert found["drafts"]["overhead"] >= 1

    code, out, _ = run(capsys, "plan", *pair, "--memory", memory, "--json")
    plan = json.loads(out)
    assert code == 0
    # Profiles have longer passes than a load plans.
    assert plan["prose"]["streamed_bytes_per_pass"] == pytest.approx(
        found["streamed_bytes_per_pass"], abs=0.05 * int(memory)
    )
    assert plan["prose"]["tokens_per_second"] == max(size["tokens_per_second"] for size in plan["sizes"])

    code, out, _ = run(capsys, "plan", *pair, "--memory", memory)
    assert code == 0
    assert re.search(r"^code +[\d.]+ ", out, re.M)
    assert "measured with this model on this machine" in out
    assert [f for f in plan_removal(smol_path).files if f.kind == "profile"]

    # What an answer's trees yield is kept with what the profile's did.
    with edgespec.load(smol_path, draft=q4_drafter_path, tree_budget=8, context=256) as engine:
        assert engine.keys is not None
        known = ProfileStore().yields(engine.keys.yields(0.0))
        passes = engine.generate("Why is the sky blue?", GenerationConfig(max_tokens=40)).passes
    assert known is not None
    assert known.passes == found["greedy"]["passes"]
    trees = [record for record in passes if record.nodes > 1]
    assert {record.nodes for record in trees[:-1]} == {8}
    now = ProfileStore().yields(engine.keys.yields(0.0))
    assert now is not None
    assert now.passes == known.passes + len(trees)
    ratio = sum(r.accepted for r in trees) / (len(trees) * (known.at(8) - 1))
    steps = sum(r.draft_steps for r in trees) / sum(known.steps_at(r.nodes) for r in trees)
    moved = known.corrected(dict.fromkeys(BUDGETS, ratio), len(trees), steps)
    assert now.steps_at(8) == pytest.approx(moved.steps_at(8), rel=1e-3)
    assert now.at(8) == pytest.approx(moved.at(8), rel=0.02)  # the last tree may be smaller
    assert all(
        now.at(b) == pytest.approx(moved.at(b), rel=0.02) for b in BUDGETS if b in now.tokens and b > 8
    )


def test_the_first_start_measures_in_a_hurry_and_the_second_knows(smol_path: Path) -> None:
    told: list[str] = []
    known = None
    for _ in range(2):
        told.clear()
        expected = known is None or known.disturbed  # by what else runs here
        with edgespec.load(
            smol_path, draft="lookup", on_progress=lambda what, _fraction: told.append(what)
        ) as engine:
            assert engine.keys is not None
            known = ProfileStore().passes(engine.keys.passes)
        assert known is not None
        assert known.quick
        assert any("Measuring" in what for what in told) is expected


@pytest.mark.slow
def test_a_busy_machine_is_told_of_and_measured_again(smol_path: Path) -> None:
    store = ProfileStore()
    with busy_machine(), edgespec.load(smol_path, draft="lookup", context=256) as engine:
        assert engine.keys is not None
        key = engine.keys.passes
        notes = engine.notes
    assert any("kept the processor busy" in note for note in notes)
    kept = store.passes(key)
    assert kept is not None
    assert kept.disturbed
    store.put(key, replace(kept, compute=kept.compute.scaled(100)))
    with edgespec.load(smol_path, draft="lookup", context=256):
        again = store.passes(key)
    assert again is not None
    assert again.compute.at(1) < kept.compute.at(1) * 100, "passes were measured again"


def test_how_fast_weights_came_is_kept_for_the_next_run(smol_path: Path) -> None:
    store = ProfileStore()
    streamed: dict[str, Any] = {"draft": "lookup", "offload": "stream", "context": 256}
    streamed["memory"] = least_memory(smol_path, **streamed) + 10_000_000
    with edgespec.load(smol_path, **streamed) as engine:
        assert engine.keys is not None
        key = engine.keys.passes
        first = store.passes(key)
        assert first is not None
        store.put(key, replace(first, read_rate=1.0))  # a disk that would give nothing
    with edgespec.load(smol_path, **streamed) as engine:
        answer = engine.generate("Count to ten.", GenerationConfig(max_tokens=12))
        weights = engine.target.model.weights
        assert isinstance(weights, StreamedWeights)
        assert weights.read_bytes >= len(answer.passes) * weights.streamed_bytes
        # Reads that arithmetic slows down take longer than those that predictions are made of.
        least, disk = 0.8 * weights.read_bytes / weights.reading_s, disk_key(weights.paths[0])
    kept, of_disk = store.passes(key), store.disk(disk)
    assert kept is not None
    assert kept.read_rate > least
    assert of_disk is not None, "for other models on this disk, too"
    assert of_disk.speed == of_disk.streamed_rate == kept.read_rate


def test_plain_decoding_and_fixed_trees_need_no_figures(smol_path: Path) -> None:
    with edgespec.load(smol_path, draft="none"), edgespec.load(smol_path, draft="lookup", tree_budget=8):
        assert not ProfileStore().folder.exists()


def test_too_little_memory_is_refused_with_what_would_do(
    smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "plan", str(smol_path), "--memory", "100MB")
    assert code == 1
    assert "--memory" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--seconds", "0"],
        ["plan", "x.gguf", "--context", "1"],
        ["plan", "x.gguf", "--threads", "0"],
        ["plan", "x.gguf", "--temperature", "-1"],
        ["plan", "x.gguf", "--memory", "lots"],
    ],
)
def test_absurd_numbers_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Error:")
