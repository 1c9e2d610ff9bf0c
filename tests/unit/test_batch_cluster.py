"""Batches on a cluster, as far as no cluster is needed: addresses, options for nodes, and lost engines."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.batch import cluster
from edgespec.cli.batch.cluster import Cluster, options_for_nodes, ray_address
from edgespec.cli.main import main
from edgespec.cli.origin import ModelIdentity
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.engine.requests import Request, RequestList
from edgespec.errors import EdgeSpecError, GrammarError, HubError, InconclusiveTrial, UsageError
from edgespec.generation.result import Generation
from tests.unit.talking import TalkingEngine, write_lines


@pytest.mark.parametrize("text", ["auto", "10.0.0.1:6379", " head.lan:1", "[::1]:6379"])
def test_addresses(text: str) -> None:
    assert ray_address(text) == text.strip()


@pytest.mark.parametrize("text", ["", "local", "head", "head:", ":1", "a:b:1", "ray://h:1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ray is '"):
        ray_address(text)


def test_a_cluster_is_for_batches(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "Hello", "--ray", "auto"]) == 2
    assert capsys.readouterr().err.startswith("Error: --ray needs --input.\n")
    monkeypatch.setenv("EDGESPEC_RAY", "auto")  # set for batches, it does not stand in the way of a prompt
    assert main(["generate", "-p", "Hello"]) == 0


def test_a_missing_package_is_named(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q"})
    before = dict(os.environ)
    assert main(["generate", "--input", str(prompts), "--ray", "auto"]) == 2
    assert dict(os.environ) == before
    what, hint = capsys.readouterr().err.splitlines()
    assert what.startswith("Error: --ray needs the package ray, but importing it failed: ")
    assert hint.startswith("Install it: pip install 'edgespec[ray]'.")
    assert not engine.asked


def test_paths_are_absolute_on_nodes_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here", "adapter", "auto"):
        Path(name).touch()
    loading = Config.of(model="gone.gguf", draft_from="here", lora=["adapter:0.5", "adapter"], pack_dir=["p"])
    options = options_for_nodes(loading)
    assert (options.model.name, options.speculation.draft) == (str(tmp_path / "gone.gguf"), "auto")
    assert options.speculation.draft_from == str(tmp_path / "here")
    assert options_for_nodes(Config.of(mmproj="mmproj.gguf")).model.mmproj == str(tmp_path / "mmproj.gguf")
    assert options.model.lora == (f"{tmp_path / 'adapter'}:0.5", str(tmp_path / "adapter"))
    assert options.memory.pack_dir == (str(tmp_path / "p"),)
    for name in (None, "smollm2-135m", "org/repo:Q4_K_M"):
        assert options_for_nodes(Config.of(model=name)) == Config.of(model=name)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Any]]:
    """The outcomes of each round of a cluster."""
    rounds: list[dict[int, Any]] = []
    asked = iter(rounds)
    monkeypatch.setattr(Cluster, "_outcomes", lambda *_: iter(next(asked).items()))
    return rounds


def _cluster() -> Cluster:
    return Cluster(None, Config(), Terminal(quiet=True))


def _answer(text: str, digest: str = "m") -> cluster._Outcome:
    return cluster._Outcome("node", Generation(text=text), model=ModelIdentity("model.gguf", digest))


def test_what_is_lost_with_an_engine_is_asked_again_and_given_up_at_last(answered: list[Any]) -> None:
    requests = [Request(f"Q{number}") for number in range(3)]
    answered += [{1: _answer("one")}, {0: _answer("zero")}, {}]
    events = list(_cluster().stream_many(RequestList(requests)))
    assert [event.request.prompt for event in events] == ["Q1", "Q0", "Q2"]
    assert [event.chunk and event.chunk.generation and event.chunk.generation.text for event in events] == [
        "one",
        "zero",
        None,
    ]
    assert str(events[2].error) == "3 engines crashed on this line."


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            cluster._Outcome("node2", error=HubError("No network.", "Try."), is_fatal=True),
            "Node node2: No network.",
        ),
        (_answer("other", "n"), "The model of this name on node node differs"),
    ],
)
def test_nodes_that_cannot_answer_end_the_batch(
    outcome: cluster._Outcome, said: str, answered: list[Any]
) -> None:
    answered += [{0: _answer("zero"), 1: outcome}]
    with pytest.raises(EdgeSpecError, match=said):
        list(_cluster().stream_many(RequestList([Request("Q0"), Request("Q1")])))


@pytest.mark.parametrize("error", [InconclusiveTrial("It", "was killed"), GrammarError("No.", "Yes.")])
def test_errors_arrive_as_they_are(error: EdgeSpecError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, vars(copy)) == (type(error), error.args, vars(error))


def test_arguments_are_checked_before_anything_is_started(engine: TalkingEngine, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q"})
    command: list[Any] = ["generate", "--input", str(prompts), "--ray", "nowhere"]
    assert main(command) == 2
    assert not engine.loaded_with
