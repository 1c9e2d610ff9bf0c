"""Batches on a cluster, as far as no cluster is needed: addresses, options for nodes, and who does what."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.batch.cluster.address import RayAddress
from edgespec.cli.batch.cluster.dispatch import MAX_LOSSES, ClusterTask, Dispatch
from edgespec.cli.batch.cluster.sharing import options_for_nodes
from edgespec.cli.main import main
from edgespec.config import Config
from edgespec.engine.requests import Request, RequestList
from edgespec.errors import UsageError
from tests.unit.talking import TalkingEngine, write_lines


@pytest.mark.parametrize(
    ("text", "expected", "head"),
    [
        ("local", RayAddress(), None),
        (" local:3 ", RayAddress("", 3), None),
        ("auto", RayAddress("auto"), None),
        ("10.0.0.1:6379", RayAddress("10.0.0.1:6379"), ("10.0.0.1", 6379)),
        ("head.lan:1", RayAddress("head.lan:1"), ("head.lan", 1)),
        ("[::1]:6379", RayAddress("[::1]:6379"), ("::1", 6379)),
    ],
)
def test_addresses(text: str, expected: RayAddress, head: tuple[str, int] | None) -> None:
    address = RayAddress.parse(text)
    assert address == expected
    assert address.host_and_port == head
    assert address.is_local == text.strip().startswith("local")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "local:0",
        "local:65",
        "local:x",
        "head",
        "head:",
        ":1",
        "a:b:1",
        "head:0",
        "head:65536",
        "ray://h:1",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ray is '"):
        RayAddress.parse(text)


def test_a_cluster_is_for_batches(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", "--ray", "local"]) == 2
    assert capsys.readouterr().err.startswith("Error: --ray needs --input.\n")
    monkeypatch.setenv("EDGESPEC_RAY", "local")  # set for batches, it does not stand in the way of a prompt
    assert main(["generate", "-p", "Hello"]) == 0


def test_a_missing_package_is_named(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q"})
    before = dict(os.environ)
    assert main(["generate", "--input", str(prompts), "--ray", "local"]) == 2
    assert dict(os.environ) == before
    what, hint = capsys.readouterr().err.splitlines()
    assert what.startswith("Error: --ray needs the package ray, but importing it failed: ")
    assert hint.startswith("Install it: pip install 'edgespec[ray]'.")
    assert not engine.asked


def test_paths_are_absolute_on_nodes_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here", "adapter", "auto"):
        Path(name).touch()
    loading = Config.of(model="gone.gguf", draft_from="here", lora=["adapter:0.5", "adapter"])
    options = options_for_nodes(loading, 1)
    assert (options.model.name, options.speculation.draft) == (f"{tmp_path}/gone.gguf", "auto")
    assert options.speculation.draft_from == f"{tmp_path}/here"
    assert options_for_nodes(Config.of(mmproj="mmproj.gguf"), 1).model.mmproj == f"{tmp_path}/mmproj.gguf"
    assert options.model.lora == (f"{tmp_path}/adapter:0.5", f"{tmp_path}/adapter")
    for name in (None, "smollm2-135m", "org/repo:Q4_K_M"):
        assert options_for_nodes(Config.of(model=name), 1) == Config.of(model=name)


def test_engines_on_one_machine_share_it() -> None:
    alone, shared = (options_for_nodes(Config(), engines) for engines in (1, 64))
    assert alone == Config()
    assert shared.devices.threads is not None
    assert shared.memory.limit is not None
    assert shared.devices.threads >= 1
    assert shared.memory.limit > 0
    asked = Config.of(threads=3, memory="1GiB")
    assert options_for_nodes(asked, 2) == asked


def _requests(count: int) -> list[Request]:
    return [Request(f"Q{number}") for number in range(count)]


def _given(dispatch: Dispatch[str]) -> list[tuple[str, int]]:
    pairs: list[tuple[str, ClusterTask]] = []
    while (pair := dispatch.next()) is not None:
        pairs.append(pair)
    return [(worker, task.number) for worker, task in pairs]


def test_workers_take_what_they_have_room_for() -> None:
    dispatch: Dispatch[str] = Dispatch(RequestList(_requests(6)))
    assert dispatch.next() is None
    dispatch.join("small", 1)
    dispatch.join("large", 4)
    assert sorted(_given(dispatch)) == [("large", 1), ("large", 2), ("large", 3), ("large", 4), ("small", 0)]
    assert dispatch.busy
    (small, *_) = [task for task in dispatch.open if task.number == 0]
    assert dispatch.done("small", small)
    assert _given(dispatch) == [("small", 5)]


def test_what_a_lost_worker_had_is_done_by_others_once_and_first() -> None:
    dispatch: Dispatch[str] = Dispatch(RequestList(_requests(5)))
    dispatch.join("a", 2)
    assert _given(dispatch) == [("a", 0), ("a", 1)]
    mine = dispatch.open
    again, given_up = dispatch.leave("a")
    assert (again, given_up) == (mine, [])
    assert not dispatch.busy
    dispatch.join("b", 3)
    assert _given(dispatch) == [("b", 0), ("b", 1), ("b", 2)]
    # The first one answers after all.
    assert not dispatch.done("a", mine[0])
    dispatch.join("a", 1)
    assert not dispatch.done("a", mine[0])
    assert dispatch.done("b", mine[0])
    assert not dispatch.done("b", mine[0])


def test_a_line_that_takes_several_workers_along_is_given_up() -> None:
    dispatch: Dispatch[int] = Dispatch(RequestList(_requests(1)))
    for worker in range(MAX_LOSSES):
        dispatch.join(worker, 1)
        given = dispatch.next()
        assert given is not None
        again, given_up = dispatch.leave(worker)
        assert len(again) == (worker < MAX_LOSSES - 1)
        assert len(given_up) == (worker == MAX_LOSSES - 1)
    dispatch.join(9, 1)
    assert dispatch.next() is None
    assert not dispatch.fetch()


def test_a_worker_is_told_once_what_nobody_wants_any_more() -> None:
    requests = _requests(2)
    dispatch: Dispatch[str] = Dispatch(RequestList(requests))
    dispatch.join("a", 2)
    _given(dispatch)
    assert dispatch.unwanted() == []
    requests[1].cancelled = True
    assert [(worker, task.number) for worker, task in dispatch.unwanted()] == [("a", 1)]
    assert dispatch.unwanted() == []
    dispatch.leave("a")
    dispatch.join("b", 2)
    _given(dispatch)
    assert [(worker, task.number) for worker, task in dispatch.unwanted()] == [("b", 1)]


def test_a_task_is_fetched_for_workers_to_come() -> None:
    dispatch: Dispatch[str] = Dispatch(RequestList(_requests(2)))
    assert dispatch.fetch()
    assert dispatch.fetch()
    assert [task.number for task in dispatch.open] == [0]
    dispatch.join("a", 5)
    assert _given(dispatch) == [("a", 0), ("a", 1)]
    assert not dispatch.fetch()


@given(st.integers(1, 30), st.lists(st.tuples(st.sampled_from("jldn"), st.integers(0, 3)), max_size=120))
def test_every_request_is_answered_or_given_up_once(count: int, steps: Iterable[tuple[str, int]]) -> None:
    """Workers join, are lost and finish in any order; late answers never count."""
    dispatch: Dispatch[int] = Dispatch(RequestList(_requests(count)))
    ended: list[int] = []
    ever: list[tuple[int, ClusterTask]] = []  # every pair that was handed out, however long ago
    here: set[int] = set()

    def step(kind: str, worker: int) -> None:
        if kind == "j" and worker not in here:
            dispatch.join(worker, 1 + worker)
            here.add(worker)
        elif kind == "l":
            here.discard(worker)
            ended.extend(task.number for task in dispatch.leave(worker)[1])
        elif kind == "d":
            ended.extend(task.number for pair in ever if dispatch.done(*pair) for task in pair[1:])
        elif (pair := dispatch.next()) is not None:
            ever.append(pair)

    for kind, worker in steps:
        step(kind, worker)
    step("j", 0)
    done_before = -1
    while len(ended) > done_before or dispatch.busy or dispatch.fetch():
        done_before = len(ended)
        step("n", 0)
        step("d", 0)
    assert sorted(ended) == list(range(count))


def test_arguments_are_checked_before_anything_is_started(engine: TalkingEngine, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q"})
    command: list[Any] = ["generate", "--input", str(prompts), "--ray", "nowhere"]
    assert main(command) == 2
    assert not engine.loaded_with


def test_what_is_no_cluster_is_not_tried_for_long(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another kind: it says something else, and hangs up."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.exceptions", ModuleType("ray.exceptions"))
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert main(["generate", "--input", str(prompts), "--ray", address]) == 1
        thread.join()
    assert capsys.readouterr().err.splitlines()[0] == f"Error: {address} is not a Ray cluster."
    assert main(["generate", "--input", str(prompts), "--ray", address]) == 1
    assert capsys.readouterr().err.startswith(f"Error: There is no Ray cluster at {address}: ")
