"""One model on several machines: workers on the loopback hold layers of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.planner import TargetPasses
from edgespec.errors import BackendError, MemoryLimitError, UsageError, WorkerError
from edgespec.kernels.ggml import rpc
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import layer_sizes
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.devices.workers import measure_workers, workers_in_words
from edgespec.planning.memory.needs import tied_bytes
from edgespec.planning.planner import Planner
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key
from edgespec.workers import protocol
from edgespec.workers.address import WorkerAddress
from edgespec.workers.connection import WorkerConnection, receive
from edgespec.workers.protocol import HEADER, RPCCommand
from tests.desk import Desk
from tests.least_memory import least_memory, load_in_least_memory
from tests.lending import LocalWorker
from tests.serving import TEXT, started
from tests.tiny import write_tiny
from tests.tiny_adapters import write_adapter
from tests.waiting import PATIENCE_S, wait_until

PROMPT = "Why is the sky blue?"
SHORT = GenerationConfig(max_tokens=24)
LINES = 9
DRAFTER = 130 << 20


@pytest.fixture(scope="module")
def has_rpc() -> None:
    if not rpc.has_rpc():
        pytest.skip("this llama.cpp build has no RPC")


@pytest.fixture
def workers(has_rpc: None) -> Iterator[tuple[LocalWorker, LocalWorker]]:
    with LocalWorker("--threads", "1") as first, LocalWorker("--threads", "1") as second:
        yield first, second


@pytest.fixture(scope="module")
def tight(smol_path: Path) -> int:
    """A memory budget for everything but a third of the layers."""
    with pytest.raises(MemoryLimitError) as failure:
        edgespec.load(smol_path, draft="none", offload="none", memory=250 << 20, context=512)
    assert failure.value.least is not None
    return failure.value.least - _left_out(smol_path)


@pytest.fixture(scope="module")
def tight_elsewhere(smol_path: Path) -> int:
    """Start a process of its own, which takes less memory itself than that of the tests."""
    command = ["generate", str(smol_path), "--draft", "none", "--offload", "none", "--context", "512"]
    failed = run(*command, "--memory", "250MiB", "-p", "Hi")
    needed = re.search(r"needs ([\d.]+) MiB of memory", failed.stderr)
    assert needed is not None, failed.stderr
    return round(float(needed[1]) * (1 << 20)) - _left_out(smol_path)


def _left_out(model: Path) -> int:
    files = ModelFiles.of(read_header(model))
    # The second copy that some kernel layouts make of the embedding is not made beside workers.
    return tied_bytes(files) + sum(layer_sizes(files)) // 3


def load(path: Path, workers: tuple[LocalWorker, ...], memory: int, **more: object) -> edgespec.Engine:
    options: dict[str, object] = {"draft": "none", "context": 512, "threads": 1, "memory": memory}
    return edgespec.load(path, workers=[w.address for w in workers], **(options | more))  # type: ignore[arg-type]


@pytest.mark.slow
def test_trees_and_exactness(
    smol_path: Path, q4_drafter_path: Path, workers: tuple[LocalWorker, LocalWorker], tight: int
) -> None:
    more = {"exact": True, "draft": str(q4_drafter_path), "tree_budget": 40}
    with load(smol_path, workers, tight + DRAFTER, **more) as engine:
        assert any(re.match(r"Layers: \d+ here, \d+ on 127", note) for note in engine.notes), engine.notes
        drafted = {}
        for budget in (40, 7, 1):
            engine.set_tree_budget(budget)
            drafted[budget] = engine.generate(PROMPT, SHORT)
        assert all(answer.exact for answer in drafted.values())
    assert drafted[40].tokens == drafted[7].tokens == drafted[1].tokens
    assert len(drafted[40].passes) < len(drafted[1].passes) == len(drafted[1].tokens)


@pytest.mark.slow
def test_two_workers_hold_layers_when_one_is_too_small(smol_path: Path, has_rpc: None, tight: int) -> None:
    layers = sum(layer_sizes(ModelFiles.of(read_header(smol_path))))
    lent = f"{(layers // 2 + (56 << 20)) >> 20}MiB"  # half of the layers, their cells, and buffers
    with (
        LocalWorker("--threads", "1", "--memory", lent) as first,
        LocalWorker("--threads", "1", "--memory", lent) as second,
        load(smol_path, (first, second), tight - layers * 2 // 3) as engine,
    ):
        (note,) = [note for note in engine.notes if note.startswith("Layers:")]
        assert first.address in note
        assert second.address in note
        answer = engine.generate(PROMPT, SHORT)
        assert len(answer.tokens) == 24
        assert answer.memory.resident_bytes < engine.target.model.n_bytes // 2


def asked(connection: WorkerConnection, command: RPCCommand, content: bytes) -> tuple[int, ...]:
    """The numbers that a worker answers with."""
    connection.socket.sendall(HEADER.pack(command, len(content)) + content)
    (length,) = protocol.LENGTH.unpack(receive(connection.socket, protocol.LENGTH.size))
    return struct.unpack(f"<{length // 8}Q", receive(connection.socket, length))


def test_a_client_that_asks_for_more_than_it_was_told_does_not_get_it(has_rpc: None) -> None:
    """The limit holds for all that is allocated together; what is freed can be lent again."""
    mib = 1 << 20
    limit, piece = 300 * mib, 64 * mib
    with LocalWorker("--threads", "1", "--memory", "300MiB") as worker:
        address = WorkerAddress.parse(worker.address)
        children = psutil.Process(worker.pid).children()
        (server,) = [child for child in children if "edgespec.workers.lending" in child.cmdline()]

        def allocate(connection: WorkerConnection, size: int) -> int:
            buffer, given = asked(connection, RPCCommand.ALLOCATE, struct.pack("<IQ", 0, size))
            assert bool(buffer) == bool(given)
            if buffer:
                content = protocol.LENGTH.pack(buffer) + b"\1"  # every page is written
                connection.socket.sendall(HEADER.pack(RPCCommand.CLEAR, len(content)) + content)
            return buffer

        for _ in range(2):  # a second client, when the first one is gone with all it had
            with WorkerConnection(address) as connection:
                before = server.memory_info().rss
                assert connection.memory(0)[0] == limit
                assert allocate(connection, limit + 1) == 0
                assert allocate(connection, 1 << 62) == 0
                buffers = [buffer for _ in range(8) if (buffer := allocate(connection, piece))]
                assert len(buffers) == limit // piece
                assert connection.memory(0)[0] == limit - len(buffers) * piece
                assert server.memory_info().rss - before < limit + 32 * mib
                assert allocate(connection, piece) == 0
                freed = protocol.LENGTH.pack(buffers.pop())
                connection.socket.sendall(HEADER.pack(RPCCommand.FREE, len(freed)) + freed)
                assert connection.memory(0)[0] == limit - len(buffers) * piece
                assert allocate(connection, piece)
                assert allocate(connection, piece) == 0


def test_memories_that_do_not_suffice(smol_path: Path, has_rpc: None, tight: int) -> None:
    with (
        LocalWorker("--memory", "24MiB") as small,
        pytest.raises(MemoryLimitError, match=r"the workers lend 24\.0 MiB") as failure,
    ):
        load(smol_path, (small,), tight, offload="none")
    assert "leave out offload='none'" in failure.value.hint


@pytest.mark.slow
def test_what_no_memory_holds_is_streamed_beside_a_worker(
    smol_path: Path, q4_drafter_path: Path, has_rpc: None
) -> None:
    files = ModelFiles.of(read_header(smol_path))
    lent = f"{(sum(layer_sizes(files)) // 8 + (56 << 20)) >> 20}MiB"  # an eighth of the layers, and buffers
    more = {"exact": True, "draft": str(q4_drafter_path), "tree_budget": 24, "context": 512, "threads": 1}
    slow = 1e6  # bytes a second, so that the worker is faster than the disk
    ProfileStore().put(disk_key(smol_path), DiskProfile(slow, slow, 1 << 20, 1))
    with (
        LocalWorker("--threads", "1", "--memory", lent) as worker,
        load_in_least_memory(smol_path, offload="auto", workers=[worker.address], **more) as engine,
    ):
        (note,) = [note for note in engine.notes if note.startswith("Layers:")]
        assert f"on {worker.address}" in note
        assert engine.target.model.weights.streamed_bytes
        drafted = {}
        for budget in (24, 1):
            engine.set_tree_budget(budget)
            drafted[budget] = engine.generate(PROMPT, SHORT)
        assert drafted[24].exact
        assert drafted[24].tokens == drafted[1].tokens
        assert len(drafted[24].passes) < len(drafted[1].passes)
        worker.kill()
        with pytest.raises(WorkerError, match=f"The worker {worker.address} is gone"):
            engine.generate(PROMPT, SHORT)


@pytest.mark.slow
def test_adapters_apply_to_layers_on_workers(
    smol_path: Path, has_rpc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # as on the worker: others may round differently
    model = write_tiny(tmp_path / "tiny.gguf", "llama", smol_path)
    lora = [str(write_adapter(tmp_path / "adapter.gguf"))]
    options: dict[str, Any] = {"draft": "none", "context": 256, "threads": 1, "offload": "none"}
    needed = least_memory(model, lora=lora, **options)
    tight = needed - sum(layer_sizes(ModelFiles.of(read_header(model)))) // 2
    texts = []
    with LocalWorker("--threads", "1") as worker:
        for more in ({}, {"lora": lora}, {"lora": lora, "workers": [worker.address], "memory": tight}):
            with edgespec.load(model, **(options | more)) as engine:
                texts.append(engine.generate(PROMPT, SHORT, raw=True).tokens)
        assert any(f"on {worker.address}" in note for note in engine.notes), engine.notes
    assert texts[0] != texts[1] == texts[2]


@pytest.mark.slow
def test_a_plan_measures_workers(smol_path: Path, has_rpc: None) -> None:
    files = ModelFiles.of(read_header(smol_path))
    here = Curve.through([(1, 0.010), (32, 0.040)])
    with LocalWorker("--threads", "1") as worker:
        workers = measure_workers([worker.address], files, threads=1)
    machine = MachineSnapshot(FreeMemory(64 << 30), 1, workers=workers)
    planner = Planner(files, Config.of(context=512, workers=[worker.address]), machine, ProfileStore())
    needs = planner.needs()
    budget = needs.total - sum(layer_sizes(files))  # so that all layers are elsewhere
    plan = planner.place(needs, budget=budget)
    assert not plan.streams
    assert plan.holding.budget > budget
    (layers,) = plan.notes
    assert layers.startswith("Layers:")
    assert worker.address in layers
    assert f"{worker.address} lends" in workers_in_words(workers, files)[0]
    over = plan.over(TargetPasses(here)).compute
    assert {*here.rows} < {*over.rows}, "and those with which the worker was measured"
    assert all(over.at(rows) != here.at(rows) for rows in here.rows)


@pytest.mark.slow
def test_a_killed_worker_ends_the_answer_and_the_next_continues(
    smol_path: Path, workers: tuple[LocalWorker, LocalWorker], tight: int
) -> None:
    with load(smol_path, workers, tight) as engine:
        (note,) = [note for note in engine.notes if note.startswith("Layers:")]
        holder = next(worker for worker in workers if worker.address in note)
        answer = engine.stream(PROMPT, GenerationConfig(max_tokens=200))
        assert next(answer).text
        holder.kill()
        with pytest.raises(WorkerError, match=f"The worker {holder.address} is gone"):
            list(answer)
        with pytest.raises(WorkerError):
            engine.generate(PROMPT, SHORT)
    with pytest.raises(WorkerError, match="cannot be reached"):
        load(smol_path, workers, tight)
    with load(smol_path, workers, tight, leave_out_missing=True) as engine:
        assert any("Continuing without it" in warning for warning in engine.warnings)
        assert len(engine.generate(PROMPT, SHORT).tokens) == 24
    for worker in workers:
        if worker is not holder:
            worker.kill()
    with load(smol_path, workers, tight, leave_out_missing=True) as engine:  # from disk
        assert engine.target.model.weights.streamed_bytes
        assert len(engine.generate(PROMPT, SHORT).tokens) == 24


@pytest.mark.slow
def test_a_worker_that_dies_while_the_model_is_loaded(
    smol_path: Path, workers: tuple[LocalWorker, LocalWorker], tight: int
) -> None:
    def kill(what: str, fraction: float) -> None:
        if what.startswith("Loading") and fraction > 0.5:
            for worker in workers:
                worker.kill()

    with pytest.raises(WorkerError, match="is gone"):
        load(smol_path, workers, tight, on_progress=kill)


def run(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgespec", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **more,  # type: ignore[call-overload]
    )


@pytest.mark.slow
def test_a_batch_continues_from_disk_after_its_workers_are_lost(
    smol_path: Path, workers: tuple[LocalWorker, LocalWorker], tight_elsewhere: int, tmp_path: Path
) -> None:
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"id": n, "prompt": f"Count to {n}."}) + "\n" for n in range(LINES)))
    command = ["generate", str(smol_path), "--input", str(given), "--output", str(answers)]
    command += ["--memory", str(tight_elsewhere), "--context", "512", "--max-tokens", "12", "--draft", "none"]
    command += ["--parallel", "1", "--threads", "1"]

    def kill_later() -> None:
        wait_until(lambda: answers.exists() and answers.read_text().count("\n") >= 2)
        for worker in workers:
            worker.kill()

    killer = threading.Thread(target=kill_later)
    killer.start()
    done = run(*command, "--workers", ",".join(worker.address for worker in workers))
    killer.join()
    assert done.returncode == 0, done.stderr
    assert "is gone" in done.stderr
    assert "Reloading the model." in done.stderr
    assert "Traceback" not in done.stderr
    lines = answers.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(LINES))


@pytest.mark.slow
def test_a_server_continues_from_disk(
    smol_path: Path, workers: tuple[LocalWorker, LocalWorker], tight_elsewhere: int
) -> None:
    options = ["--memory", str(tight_elsewhere), "--context", "512", "--threads", "1", "--draft", "none"]
    named = ",".join(worker.address for worker in workers)
    with started(smol_path, *options, "--parallel", "1", "--workers", named) as (server, _):
        assert server.text()
        for worker in workers:
            worker.kill()
        status, answer = server.post(TEXT, {"prompt": PROMPT, "max_tokens": 4})
        assert status >= 500
        assert "is gone" in json.dumps(answer)
        wait_until(lambda: server.post(TEXT, {"prompt": PROMPT, "max_tokens": 4})[0] == 200)


@pytest.mark.slow
@pytest.mark.usefixtures("at_a_desk")
def test_a_chat_continues_from_disk(
    smol_path: Path, workers: tuple[LocalWorker, LocalWorker], tight_elsewhere: int
) -> None:
    memory = tight_elsewhere - (16 << 20)  # a chat takes less itself than `generate`
    options = ["--memory", str(memory), "--context", "512", "--draft", "none", "--max-tokens", "8"]
    options += ["--workers", ",".join(worker.address for worker in workers), "--session", "shared"]
    with contextlib.closing(Desk("chat", str(smol_path), *options)) as desk:
        desk.ask(PROMPT, until=" tokens, ")
        for worker in workers:
            worker.kill()
        desk.ask("And at night?", until="/retry reloads the model")
        desk.ask("/retry", until="Continuing without it")
        desk.wait_for("Reloaded the model.")
        desk.wait_for(" tokens, ")
        assert desk.leave_by("/bye\r") == 0
    (saved,) = Path(os.environ["XDG_DATA_HOME"]).parent.rglob("shared.json")
    record = json.loads(saved.read_text())
    assert [m["content"] for m in record["messages"]][::2] == [PROMPT, "And at night?"]


def test_a_worker_says_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("worker", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "is already in use." in done.stderr
    open_to_all = run("worker", "--listen", "0.0.0.0:0")
    assert open_to_all.returncode == 2
    assert "a worker has no password" in open_to_all.stderr
    assert "--public" in open_to_all.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_ends_with_ctrl_c(has_rpc: None) -> None:
    worker = LocalWorker("--memory", "64MiB")
    assert [device["free"] for device in worker.devices][-1] == 64 << 20
    assert worker.stop() == 130


def test_a_worker_outlives_a_client_that_crashes_its_server(has_rpc: None) -> None:
    """llama.cpp's server asserts what a request says of tensors, and anybody may send one."""
    with LocalWorker("--threads", "1") as worker:
        address = WorkerAddress.parse(worker.address)
        with WorkerConnection(address) as connection:
            client = connection.socket
            client.sendall(HEADER.pack(RPCCommand.ALLOCATE, 12) + struct.pack("<IQ", 0, 4096))
            _, buffer, _ = struct.unpack("<QQQ", receive(client, 24))
            nonsense = protocol.set_content(protocol.numbers_at(buffer, 1 << 60, 4), bytes(16))
            client.sendall(HEADER.pack(RPCCommand.SET, len(nonsense)) + nonsense)
            with pytest.raises(OSError, match=r"closed|reset"):
                receive(client, 1)

        def lends() -> bool:
            with contextlib.suppress(WorkerError), WorkerConnection(address) as connection:
                return connection.devices() >= 1
            return False

        wait_until(lends)


def test_a_server_ends_with_the_program_that_started_it(has_rpc: None) -> None:
    with LocalWorker("--threads", "1") as worker:
        process = psutil.Process(worker.pid)
        children = process.children(recursive=True)
        (server,) = [child for child in children if "edgespec.workers.lending" in child.cmdline()]
        process.kill()
        server.wait(PATIENCE_S)
        with pytest.raises(WorkerError, match="cannot be reached"):
            WorkerConnection(WorkerAddress.parse(worker.address))


def test_a_build_without_rpc_says_so(smol_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if rpc.has_rpc():
        pytest.skip("this llama.cpp build has RPC")
    with pytest.raises(BackendError, match="it has no RPC"):
        edgespec.load(smol_path, workers=["127.0.0.1:1"])
    done = run("worker")
    assert done.returncode == 1
    assert "it has no RPC" in done.stderr


def test_what_does_not_go_together(smol_path: Path) -> None:
    for more in ({"offload": "stream"}, {"gpu_layers": 1}, {"draft_device": "CUDA0"}):
        with pytest.raises(UsageError, match="exclude each other"):
            edgespec.load(smol_path, workers=["127.0.0.1:1"], **more)  # type: ignore[arg-type]
