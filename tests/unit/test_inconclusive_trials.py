"""Trials that prove nothing: children that are killed, stopped, starved, or refused memory by the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.api.refusals import refusal_for
from edgespec.base.progress import no_progress
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import DevicesConfig
from edgespec.errors import EdgeSpecError, InconclusiveTrial, ModelFileError
from edgespec.files.user_folders import cache_folder
from edgespec.generation.config import Grammar
from edgespec.kernels import report_store
from edgespec.kernels.device_speed import measure_speeds
from edgespec.kernels.native import build
from edgespec.kernels.report import TrialReport
from edgespec.kernels.report_store import ensure_report
from edgespec.kernels.setting import VARIABLE
from edgespec.kernels.trial import run_trial
from edgespec.llama.build import BuildDevice
from edgespec.llama.cache.state_cache import N_SEQUENCES
from edgespec.llama.row_rule import RowRuleStore
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.llama.state_trees import BranchingStore
from edgespec.machine.contention import ContentionWatch
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.models.gguf.header import read_header
from edgespec.planning.devices.finding import PlacementRequest, measured
from edgespec.processes import children, trial
from edgespec.profiles.store import ProfileStore
from edgespec.text.grammar.matchers import check_grammar
from tests.fuzz.headers import STRING, Entry, small_model
from tests.tiny import write_tiny
from tests.tiny_adapters import write_adapter
from tests.tiny_hybrids import HYBRIDS
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, and limits on address space")

_HARM = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "stopped": "import os; os.kill(os.getpid(), 19)",
    "ended": "import os; os.kill(os.getpid(), 15)",
    "refused": (
        "import resource; n = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (n + (1 << 20), n + (1 << 20)))"
    ),
}
_BOOT = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from importlib import import_module\n"
    "from edgespec.processes.trial import serve\n"
    "module = import_module(sys.argv[3])\n"
    "def attempt(request):\n"
    "    {harm}\n"
    "    return module.attempt(request)\n"
    "serve(attempt)\n"
)


@pytest.fixture
def harm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have every child meet its fate: as soon as it has started, or refused memory for what it attempts."""

    def harm_children(fate: str) -> None:
        if fate == "stopped":
            monkeypatch.setattr(trial, "_STARTING_S", 0.3)
            monkeypatch.setattr(trial, "_WALL_PER_CPU", 0.0)
        boot = _BOOT.format(harm=_HARM[fate]) if fate == "refused" else _HARM[fate]
        monkeypatch.setattr(children, "_BOOT", boot)

    return harm_children


def saved() -> set[Path]:
    found = cache_folder().rglob("*")
    return {path for path in found if path.is_file() and path.suffix != ".lock"}


@pytest.fixture
def new_model(smol_path: Path, tmp_path: Path) -> Path:
    """A model that no child has tried, and a folder of verdicts that no other test writes to."""
    if (verdicts := cache_folder() / "vetted").is_symlink():
        verdicts.unlink()
    model = small_model(smol_path)
    model.entries.append(Entry(b"general.description", STRING, str(tmp_path).encode()))
    path = tmp_path / "model.gguf"
    path.write_bytes(model.to_bytes())
    return path


def vet_model(model: Path) -> None:
    require_loadable([read_header(model)])


def vet_mtp_layers(model: Path) -> None:
    require_loadable([read_header(model)], mtp=True, trial="edgespec.heads.head_trial")


def vet_adapter(model: Path) -> None:
    adapter = write_adapter(model.with_name("adapter.gguf"))
    require_loadable([read_header(adapter)], read_header(model))


def try_device(model: Path) -> None:
    measured(
        BuildDevice("CPU", str(model), "gpu", 0, 0), 2, PlacementRequest(DevicesConfig(), 1, ProfileStore())
    )


TRIALS: dict[str, Callable[[Path], object]] = {
    "model": vet_model,
    "mtp layers": vet_mtp_layers,
    "adapter": vet_adapter,
    "device": try_device,
    "products": lambda _: measure_speeds(2, 1),
}


@pytest.mark.parametrize("fate", ["killed", "stopped", "refused"])
@pytest.mark.parametrize("tried", TRIALS)
def test_a_trial_that_proves_nothing_is_not_saved(
    tried: str, fate: str, new_model: Path, harm: Callable[[str], None]
) -> None:
    harm(fate)
    before = saved()
    with pytest.raises(InconclusiveTrial, match="was inconclusive") as caught:
        TRIALS[tried](new_model)
    assert "try again" in caught.value.hint
    assert saved() == before


def test_a_later_trial_is_a_verdict(
    new_model: Path, harm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as harmed:
        harmed.setattr(children, "_BOOT", _BOOT.format(harm=_HARM["killed"]))
        with pytest.raises(InconclusiveTrial, match="was ended by SIGKILL"):
            vet_model(new_model)
    before = saved()
    vet_model(new_model)
    assert len(saved() - before) == 1


def test_a_long_wait_is_reported_and_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "_BOOT", _HARM["stopped"])
    monkeypatch.setattr(trial, "_STARTING_S", 5.0)
    monkeypatch.setattr("edgespec.cli.screen.terminal._LONG_WAIT_S", 0.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def work() -> None:
        with Terminal().working():
            timer.start()
            trial.attempt_in_child("json", {}, subject="Loading big.gguf", cpu_s=0.0)

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert not isinstance(caught.value.__context__, InconclusiveTrial), (
        "it was waited for until the time limit"
    )
    noted = "Waiting for a child process to try this first: Loading big.gguf"
    assert capsys.readouterr().err.splitlines().count(noted) == 1


def test_a_child_that_may_not_run_has_a_remedy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(InconclusiveTrial, match="Permission denied") as caught:
        trial.attempt_in_child("json", {}, subject="It", cpu_s=0.0)
    assert caught.value.hint == f"Nothing was recorded. Allow {program} to be run, and try again."


def test_a_stopped_child_dies_with_its_parent(tmp_path: Path) -> None:
    place = tmp_path / "child"
    stop = (
        f"import os, pathlib; pathlib.Path({str(place)!r}).write_text(str(os.getpid()));"
        "os.kill(os.getpid(), 19)"
    )
    program = (
        "from edgespec.processes import children, trial\n"
        f"children._BOOT = children._BOOT.replace('from importlib', {stop!r} + '\\nfrom importlib')\n"
        "trial.attempt_in_child('json', {}, subject='It', cpu_s=1.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: place.is_file() and _state(place) == "T")
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: _state(place) in ("Z", ""))


def _state(place: Path) -> str:
    """The state of the process whose number is in a file; empty if there is none."""
    try:
        return Path(f"/proc/{place.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_grammar_that_could_not_be_tried_is_not_called_wrong(harm: Callable[[str], None]) -> None:
    form = Grammar("grammar", "start: A\nA: " + '"a"? ' * 2000)
    for fate in ("killed", "stopped"):
        harm(fate)
        with pytest.raises(InconclusiveTrial):
            check_grammar(form)


def test_a_client_is_told_that_a_trial_proved_nothing() -> None:
    untried = InconclusiveTrial("The grammar", "was ended by SIGKILL")
    assert refusal_for(untried).status == 503


@pytest.mark.parametrize("fate", _HARM)
def test_layouts_that_could_not_be_tried_are_left_out_by_this_process_alone(
    fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(build, "reports_folder", lambda: tmp_path)
    runs = []

    def try_out() -> TrialReport:
        runs.append(1)
        program = f"{_HARM[fate]}\nfrom edgespec.kernels import trial_worker\ntrial_worker.main()"
        return run_trial([sys.executable, "-c", program], 0.3 if fate == "stopped" else PATIENCE_S)

    for _ in range(2):
        monkeypatch.setattr(report_store, "_found", None)  # another process
        assert not ensure_report(try_out).seconds
        assert not list(tmp_path.glob("*.json"))
    assert len(runs) == 2


def test_a_load_continues_without_what_could_not_be_measured(
    smol_path: Path, harm: Callable[[str], None], tmp_path: Path
) -> None:
    harm("killed")
    store = ProfileStore(tmp_path)
    costs = DerivedPasses(store, 1, no_progress)
    header = read_header(smol_path)
    assert costs.curve([header]).at(1) > 0
    assert costs.disturbed
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_was_stopped_is_disturbed() -> None:
    watch = ContentionWatch(1, computing=True)
    time.sleep(0.2)  # as after SIGSTOP, this process does not run
    assert watch.disturbed


def test_running_out_of_processor_time_is_a_verdict(new_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.llama.runtime.vetting._MAX_S", 1.0)
    monkeypatch.setattr(children, "_BOOT", _BOOT.format(harm="\n    while True: pass"))
    with pytest.raises(ModelFileError, match="it does not finish"):
        vet_model(new_model)


@pytest.mark.parametrize("tried", ["branches", "row rule"])
def test_a_pass_that_fails_is_no_outcome(tried: str, tmp_path: Path, smol_path: Path) -> None:
    """A real model, as passes of a closed context fail in llama.cpp's stead."""
    start_backend()
    with Model(write_tiny(tmp_path / "tiny.gguf", "qwen35", smol_path, kind=HYBRIDS["qwen35"])) as model:
        sizes = {"n_cells": 256, "n_rows": 64, "n_outputs": 64, "n_sequences": N_SEQUENCES}
        context = Context(model, **sizes, n_threads=1, branching=True)
        context.close()
        store: BranchingStore | RowRuleStore
        store = BranchingStore(tmp_path / "kept") if tried == "branches" else RowRuleStore(tmp_path / "kept")
        with pytest.raises(EdgeSpecError):
            store.get("fingerprint", "held", context)
    assert not list(tmp_path.glob("kept/*"))


def test_a_large_request_reaches_a_child_that_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than a pipe holds, to a child that reads nothing yet when its answer is first waited for."""
    module = (
        "import time\ntime.sleep(0.5)\ndef attempt(request):\n    return {'read': len(request['text'])}\n"
    )
    (tmp_path / "slow_to_start.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    verdict = trial.attempt_in_child("slow_to_start", {"text": "x" * 1_000_000}, subject="It", cpu_s=1.0)
    assert verdict.answer == {"read": 1_000_000}


@pytest.mark.parametrize("output", [b'{"out_of_memory": true}', b"", b'{"out'])
def test_systems_without_a_signal_for_processor_time(output: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was refused memory there, or ended early, is no verdict."""
    ended = subprocess.CompletedProcess([], 0, b"started\n" + output, b"")
    monkeypatch.delattr(signal, "SIGXCPU")
    monkeypatch.setattr(trial, "_run", lambda *_: ended)
    with pytest.raises(InconclusiveTrial):
        trial.attempt_in_child("m", {}, subject="Loading x.gguf", cpu_s=1.0)
