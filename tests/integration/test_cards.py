"""Layers and drafters on a device of this machine: a real one where there is one, and a worker's as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.errors import UsageError
from edgespec.kernels.ggml import rpc
from edgespec.kernels.ggml.buffer_types import device_named
from edgespec.kernels.native.guard import call_guard
from edgespec.kernels.native.offload import can_be_set
from edgespec.llama.build import current_build
from edgespec.planning.devices.finding import UNPINNED, find_devices
from tests.card_session import sent
from tests.lending import LocalWorker
from tests.tiers import slow_except
from tests.tiny import write_tiny
from tests.tiny_adapters import write_adapter
from tests.tiny_heads import write_pair
from tests.tiny_rwkv import write_rwkv

Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def has_rpc() -> None:
    if not rpc.has_rpc() or current_build().gpus:
        pytest.skip("this llama.cpp build has no RPC, or a device of its own")


@pytest.fixture(scope="module")
def cases(
    smol_path: Path, q4_drafter_path: Path, has_rpc: None, tmp_path_factory: pytest.TempPathFactory
) -> Cases:
    """Layers and drafters in all places, by `tests.card_session`."""
    folder = tmp_path_factory.mktemp("tiny")
    pair = write_pair(folder, smol_path)
    mixture = write_tiny(folder / "mixture.gguf", "qwen3moe", smol_path)
    adapter = write_adapter(folder / "adapter.gguf")
    tiny = {"mixture": mixture, "target": pair.target, "head": pair.head, "adapter": adapter}
    with LocalWorker("--threads", "1") as worker:
        return session(smol_path, q4_drafter_path, worker, **{n: str(path) for n, path in tiny.items()})


def session(
    model: Path, drafter: Path, worker: LocalWorker, kernels: str = "plain", **more: int | str | list[str]
) -> dict[str, Any]:
    order = {"address": worker.address, "model": str(model), "drafter": str(drafter), **more}
    done = subprocess.run(
        [sys.executable, "-m", "tests.card_session", json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        # The worker computes with weights as they are in the file, and other kernels round differently.
        env=os.environ | {"EDGESPEC_KERNELS": kernels},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_layers_on_a_device_give_the_same_text(cases: Cases) -> None:
    here, half, everything = cases["processor"], cases["half"], cases["all"]
    assert here["tokens"] == half["tokens"] == everything["tokens"]
    assert (here["layers"], half["layers"]) == ("", "15 here, 15 on RPC0")
    assert everything["layers"] == "0 here, 30 on RPC0, the output on RPC0"
    assert here["device_bytes"] == 0 < half["device_bytes"] * 2 == everything["device_bytes"]
    assert any(note.startswith("RPC0 (") and "free of" in note for note in half["notes"])


@pytest.mark.slow
def test_the_rest_is_streamed_beside_a_device_and_decoded_exactly(cases: Cases) -> None:
    plain, trees = cases["streamed"], cases["streamed with trees"]
    for found in (plain, trees):
        assert found["exact"], found
        assert found["streamed"] > 0
        assert found["layers"] == "20 here, 10 on RPC0"
    assert plain["tokens"] == trees["tokens"]
    assert trees["passes"] < plain["passes"]


@pytest.mark.slow
def test_a_drafter_on_a_device(cases: Cases) -> None:
    found = cases["drafter"]
    assert "The drafter is on RPC0." in found["notes"]
    assert found["layers"] == ""
    assert found["tokens"] == cases["exact"]["tokens"]
    assert found["passes"] < len(found["tokens"])


@pytest.mark.slow
def test_single_experts_are_streamed_beside_a_device(cases: Cases) -> None:
    found = cases["single experts"]
    assert found["layers"] == "4 here, 2 on RPC0"
    assert found["misses"] > 0
    assert found["tokens"] == cases["mixture"]["tokens"]


@pytest.mark.slow
def test_attention_on_a_device_and_feed_forward_weights_here(cases: Cases) -> None:
    assert "error" not in cases["attention"], cases["attention"]
    found, streamed = cases["attention"], cases["attention, the rest streamed"]
    assert "0 here, 30 on RPC0 without the feed-forward weights of" in found["layers"]
    assert found["device_bytes"] > 0
    assert found["tokens"] == cases["processor"]["tokens"]
    some, there = placed(long := cases["attention, a long context"])
    assert 0 < there < some + there == 30
    assert "on RPC0 without the feed-forward weights of" in long["layers"]
    assert long["tokens"] == found["tokens"]
    assert any(
        said.startswith(f"Attention of {there} of 30 layers fits on RPC0") for said in long["warnings"]
    )
    assert streamed["streamed"] > 0
    assert "0 here, 30 on RPC0 without the feed-forward weights of" in streamed["layers"]
    assert streamed["tokens"] == cases["processor"]["tokens"]


@pytest.mark.slow
def test_attention_of_a_mixture_on_a_device_and_experts_here(cases: Cases) -> None:
    assert "error" not in cases["attention of a mixture"], cases["attention of a mixture"]
    found, single = cases["attention of a mixture"], cases["attention, single experts"]
    assert "0 here, 6 on RPC0 without the feed-forward weights of" in found["layers"]
    assert found["tokens"] == cases["mixture"]["tokens"]
    assert single["misses"] > 0
    assert single["tokens"] == cases["mixture"]["tokens"]
    everything = cases["nothing left to stream"]
    assert (everything["layers"], everything["streamed"]) == ("0 here, 6 on RPC0, the output on RPC0", 0)
    assert everything["tokens"] == cases["mixture"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["head", "head and streamed"])
def test_a_head_reads_hidden_states_of_layers_on_a_device(cases: Cases, case: str) -> None:
    found = cases[case]
    assert found["layers"] == "3 here, 3 on RPC0"
    assert found["tokens"] == cases["target"]["tokens"]
    assert found["passes"] < len(found["tokens"])
    assert (found["streamed"] > 0) == (case != "head")


@pytest.mark.slow
def test_an_adapter_applies_to_layers_on_a_device(cases: Cases) -> None:
    found = cases["adapter"]
    assert found["layers"] == "3 here, 3 on RPC0"
    assert found["tokens"] == cases["adapter here"]["tokens"] != cases["target"]["tokens"]


@pytest.mark.slow
def test_a_device_that_is_not_there(cases: Cases) -> None:
    assert cases["unknown"]["error"].startswith("There is no device 'CUDA7' here. Devices: RPC0 (")


@pytest.mark.slow
def test_a_plan_names_devices(cases: Cases) -> None:
    notes = cases["plan"]["notes"]
    assert "Layers: 15 here, 15 on RPC0." in notes
    assert any("times as long there as on the processor" in note for note in notes)


@pytest.mark.slow
def test_a_device_that_runs_out_of_memory_gets_less(
    smol_path: Path, q4_drafter_path: Path, has_rpc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # a thread's arena would reserve as much as the model takes
    with LocalWorker("--threads", "1") as worker:
        found = session(smol_path, q4_drafter_path, worker, server=server_of(worker))
    for case in ("out of memory", "attention out of memory"):
        assert len(found[case].get("tokens", ())) == 16, found
        assert "A device ran out of memory" in found[case]["warnings"][0]
        assert "retrying with less there (" in found[case]["warnings"][0]
    here, there = placed(found["out of memory"])
    assert (here + there, 0 < there < 30) == (30, True)
    first, *_ = found["attention out of memory"]["warnings"]
    assert "on RPC0 without the feed-forward weights of" in first  # rather than whole layers
    assert found["attention out of memory"]["tokens"] == found["out of memory"]["tokens"]


def test_a_device_that_fails_in_an_answer_is_left_out_from_then_on(short_path: Path, has_rpc: None) -> None:
    if call_guard() is None:
        pytest.skip("EdgeSpec's library was not compiled, so nothing can be caught")
    found = failing(short_path, "lost")
    assert len(found["said"]) == 2
    for said in found["said"]:
        assert said.startswith("DeviceLostError: RPC0 failed while it computed: "), said
        assert "ggml_backend_dev_count()" in said
    assert found["lost"]  # another model there, which did not compute then
    assert found["again"]["layers"] == ""
    assert found["again"]["tokens"] == found["processor"]["tokens"]


def test_a_device_that_runs_out_of_memory_in_an_answer_gets_less(short_path: Path, has_rpc: None) -> None:
    found = failing(short_path, "memory")
    assert len(found["said"]) == 2
    for said in found["said"]:
        assert said.startswith("DeviceMemoryError: RPC0 ran out of memory while it computed: "), said
    assert found["before"].endswith(", the output on RPC0")
    assert "on RPC0" in found["again"]["layers"]
    assert "the output" not in found["again"]["layers"]  # the larger part of so small a model
    assert not found["lost"]
    assert found["again"]["tokens"] == found["processor"]["tokens"]


@pytest.mark.parametrize(
    ("how", "asked"),
    slow_except([("memory", "--input")], product(("lost", "memory"), ("--prompt", "--input"))),
)
def test_a_command_repeats_what_a_failed_device_has_not_finished(
    how: str, asked: str, short_path: Path, has_rpc: None, tmp_path: Path
) -> None:
    if how == "lost" and call_guard() is None:
        pytest.skip("EdgeSpec's library was not compiled, so nothing can be caught")
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", "bc", "def")), "utf-8")
    value = "Why is the sky blue?" if asked == "--prompt" else str(lines)
    found = failing(short_path, how, command=[asked, value])
    assert (found["code"], found["said"].count("Reloading the model.")) == (0, 1), found
    assert found["said"].startswith("RPC0 ")
    assert _texts(found["text"]) == _texts(found["processor"]) != []


def _texts(printed: str) -> list[str]:
    return [json.loads(line)["text"] if line.startswith("{") else line for line in printed.splitlines()]


def placed(case: dict[str, Any]) -> tuple[int, int]:
    """The layers here, and on the device."""
    here, there, *_ = (int(part.split()[0]) for part in case["layers"].split(", ")[:2])
    return here, there


def failing(model: Path, how: str, **more: list[str]) -> dict[str, Any]:
    """Answers on a device that fails in the middle of one, and answers after that."""
    with LocalWorker("--threads", "1") as worker:
        return session(model, model, worker, fails=how, **more)


def server_of(worker: LocalWorker) -> int:
    """The process of a worker that computes."""
    children = psutil.Process(worker.pid).children()
    (server,) = [child for child in children if "edgespec.workers.lending" in child.cmdline()]
    return server.pid


@pytest.fixture(scope="module", params=slow_except([""], ["", "plain"]))
def amended(request: pytest.FixtureRequest, short_path: Path, has_rpc: None) -> Cases:
    """A device that pins memory, and one whose memory is taken, with each setting of the kernels."""
    with LocalWorker("--threads", "1") as worker:
        return session(short_path, short_path, worker, request.param, pins=1)


@pytest.fixture(scope="module", params=["", "plain"])
def hindered(
    request: pytest.FixtureRequest,
    short_path: Path,
    has_rpc: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Cases:
    """Weights that are sent to a device from the file, beside views of them, or while a disk fails."""
    views = write_rwkv(tmp_path_factory.mktemp("views") / "rwkv.gguf", short_path)
    with LocalWorker("--threads", "1") as worker:
        return session(short_path, short_path, worker, request.param, views=str(views))


@pytest.mark.slow
def test_weights_beside_a_device_are_rearranged_before_they_are_pinned(amended: Cases) -> None:
    found = amended["pinned"]
    wanted = set(found["layouts"]) or {"CPU_Mapped"}
    assert wanted & set(found["kinds"]), found


def test_transfers_are_measured_from_memory_that_is_pinned(amended: Cases) -> None:
    assert amended["pinned"]["measured"] > 0
    assert min(amended["pinned"]["transfers"]) > 0


def test_weights_are_sent_to_a_device_from_the_rows_on_that_were_asked_for(amended: Cases) -> None:
    if not can_be_set():
        pytest.skip("EdgeSpec's library was not compiled, so ggml decides")
    require_sent_as_asked(amended["sent"])
    require_sent_as_asked(amended["sent from disk"])
    for there, streamed in zip(amended["sent"].values(), amended["sent from disk"].values(), strict=True):
        assert [each["logits"] for each in there] == [each["logits"] for each in streamed]


@pytest.mark.slow
def test_weights_of_the_file_are_sent_from_the_rows_on_that_were_asked_for(hindered: Cases) -> None:
    if not can_be_set():
        pytest.skip("EdgeSpec's library was not compiled, so ggml decides")
    require_sent_as_asked(hindered["sent from file"])


@pytest.mark.slow
def test_weights_from_disk_are_not_sent_where_ggml_would_decide_it(hindered: Cases) -> None:
    never = hindered["sent"]["never"]
    for found, expected in zip(hindered["sent by ggml"], never, strict=True):
        assert not found["copied"]
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=0.05)


@pytest.mark.slow
def test_what_reads_views_of_weights_is_computed_where_these_are(hindered: Cases) -> None:
    """A view's copy would be made from wherever its weight points to, and nobody knows of it."""
    if not can_be_set():
        pytest.skip("EdgeSpec's library was not compiled")
    found = hindered["views"]
    assert "Use gpu_layers=0" in found["refused"]
    expected = found["memory"]["never"]
    for source in ("memory", "disk", "file"):
        assert [bool(each["copied"]) for each in found[source]["always"]] == [True] * 5
        for passes in found[source].values():
            for each, correct in zip(passes, expected, strict=True):
                assert not each["views"]
                if source == "file" and not each["copied"]:
                    continue  # other kernels round differently
                np.testing.assert_allclose(each["logits"], correct["logits"], rtol=0, atol=1e-2)


def test_a_load_in_which_a_device_fails_is_repeated_without_it(amended: Cases) -> None:
    if call_guard() is None:
        pytest.skip("EdgeSpec's library was not compiled, so nothing can be caught")
    for name in ("weights", "context"):
        found = amended["failed in loads"][name]
        assert found["layers"] == ""
        (warning,) = (each for each in found["warnings"] if "RPC0" in each)
        assert warning.startswith("RPC0 failed while it computed: ")
        assert warning.endswith("Retrying without it.")


def test_loads_in_which_a_drafter_has_no_memory_come_to_an_end(amended: Cases) -> None:
    if call_guard() is None:
        pytest.skip("EdgeSpec's library was not compiled, so nothing can be caught")
    assert "RPC0 ran out of memory while it computed" in amended["failed in loads"]["drafter"]["error"]


def test_memory_that_is_pinned_for_a_lost_device_is_not_freed(amended: Cases) -> None:
    assert amended["freed when lost"]


@pytest.mark.slow
def test_passes_that_fail_while_weights_from_disk_are_sent_can_be_repeated(hindered: Cases) -> None:
    for name in ("interrupted", "interrupted state"):  # what is not a number would stay in a running state
        found = hindered[name]
        assert found["passes"] == 60
        assert found["failed"] > 10, found
        assert found["differ"] == 0, found


def test_weights_are_sent_to_a_real_device_from_the_rows_on_that_were_asked_for(short_path: Path) -> None:
    if not current_build().gpus or not can_be_set():
        pytest.skip("there is no graphics card, or EdgeSpec's library was not compiled")
    device = device_named(current_build().gpus[0].name)
    assert device is not None
    require_sent_as_asked(sent(short_path, device))
    require_sent_as_asked(sent(short_path, device, "disk"))
    require_sent_as_asked(sent(short_path, device, "file"))


def test_a_load_sends_weights_over_a_fast_link(amended: Cases) -> None:
    if not can_be_set():
        pytest.skip("EdgeSpec's library was not compiled, so ggml decides")
    here, half = amended["fast link"]["here"], amended["fast link"]["half"]
    assert half["layers"] == "2 here, 2 on RPC0"
    assert "Weights in memory are sent to the card in every pass." in half["notes"]
    assert not any("Weights in memory" in note for note in here["notes"])
    assert UNPINNED not in half["notes"]  # the device has no such memory
    unpinned = amended["fast link"]["half, unpinned"]
    assert UNPINNED in unpinned["notes"], unpinned
    assert unpinned["tokens"] == half["tokens"]
    assert UNPINNED in amended["fast link"]["streamed, unpinned"]["notes"]
    assert amended["fast link"]["refuses"]
    assert not amended["pinned"]["refuses"]
    if not amended["pinned"]["layouts"]:  # other kernels round differently
        assert half["tokens"] == here["tokens"]


def test_a_load_sends_weights_from_disk_over_a_fast_link(amended: Cases) -> None:
    if not can_be_set():
        pytest.skip("EdgeSpec's library was not compiled, so ggml decides")
    cases = amended["fast link"]
    for name in ("streamed", "streamed with trees", "streamed exactly"):
        found, sends = cases[name], "exactly" not in name
        assert found["streamed"] > 0, found
        assert found["layers"] == "3 here, 1 on RPC0"
        note = "Weights in memory and from disk are sent to the card in every pass."
        assert (note in found["notes"]) == sends
        assert found["exact"] == (not sends)
        # Other kernels round differently, and so do these with the rows of trees.
        if not amended["pinned"]["layouts"] and "trees" not in name:
            assert found["tokens"] == cases["here"]["tokens"]


@pytest.mark.slow
def test_a_long_prompt_is_read_with_weights_of_the_file(hindered: Cases) -> None:
    if not can_be_set() or not hindered["layouts"]:
        pytest.skip("weights are not rearranged here, or EdgeSpec's library was not compiled")
    found = hindered["reread"]
    assert any("they are read from the model's file and sent to the card" in n for n in found["notes"]), found
    assert found["tokens"] == 4
    assert found["read"] >= found["layers"], found


def require_sent_as_asked(found: Mapping[str, Any]) -> None:
    """Check `tests.card_session.sent`."""
    copied = {name: [bool(each["copied"]) for each in passes] for name, passes in found.items()}
    some = [False, True, True, False, True]
    assert copied == {"never": [False] * 5, "from three": some, "always": [True] * 5}
    assert all(name.startswith("blk.") for name in found["always"][0]["copied"])  # not the output
    for passes in found.values():  # the device's kernels may round differently
        for here, there in zip(found["never"], passes, strict=True):
            assert np.allclose(here["logits"], there["logits"], atol=0.02 * np.ptp(here["logits"]))


def test_memory_that_is_taken_after_planning_is_noticed(amended: Cases) -> None:
    found = amended["taken"]
    assert len(found.get("tokens", ())) == 16, found
    assert "a moment ago)" in found["warnings"][0]


def test_a_device_named_where_there_is_none() -> None:
    if current_build().gpus:
        pytest.skip("there is a device")
    with pytest.raises(UsageError, match="There is no device 'CUDA0' here") as failure:
        find_devices(["CUDA0"])
    assert "edgespec doctor" in failure.value.hint


def test_a_real_device_gives_the_same_text_with_all_layers(smol_path: Path) -> None:
    if not current_build().gpus:
        pytest.skip("this llama.cpp build finds no graphics card here")
    texts = []
    for layers in (0, 15, "all"):
        with edgespec.load(smol_path, draft="none", context=512, gpu_layers=layers) as engine:
            texts.append(engine.generate("Why is the sky blue?", GenerationConfig(max_tokens=16)).text)
    assert texts[0][:20] == texts[1][:20] == texts[2][:20]  # rounding may decide later
