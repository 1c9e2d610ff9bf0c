"""Batches on a real Ray cluster on loopback: only it loses engines, and only a model has texts to compare."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.talking import records, write_lines
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'edgespec[ray]'"
    ),
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
    pytest.mark.usefixtures("at_a_desk"),
]

_REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Name a colour."}], "n": 2}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LINES: list[Any] = [
    {"id": "greedy", "prompt": "Name a colour."},
    {"id": "seeded", "prompt": "Name an animal.", "temperature": 0.9, "n": 2},
    {"custom_id": "request", "method": "POST", "url": "/v1/chat/completions", "body": _REQUEST},
    {"id": "schema", "prompt": "Give a number.", "json_schema": _SCHEMA, "max_tokens": 16},
    {"id": "invalid", "prompt": "x", "temprature": 1},
    {"id": "long", "prompt": "word " * 2000},
    *({"id": f"q{number}", "prompt": f"Count to {number}.", "temperature": 0.5} for number in range(10)),
]
SETTINGS = ["--exact", "--max-tokens", "6", "--seed", "7", "--context", "512", "--tree-budget", "4"]
SETTINGS += ["--parallel", "2", "--memory", "1GiB"]


class Batch:
    """A running `edgespec generate --input FILE`, and what it writes."""

    def __init__(self, model: Path | str, lines: list[Any], output: Path, *flags: str) -> None:
        self.output = output
        self.errors = output.with_suffix(".err")
        source = write_lines(output.with_suffix(".in"), *lines)
        files = ["--input", str(source), "--output", str(output)]
        with self.errors.open("w") as errors:
            self.program = subprocess.Popen(
                [sys.executable, "-m", "edgespec", "generate", str(model), *files, *SETTINGS, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.processes = psutil.Process(self.program.pid)

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and standard error. Nothing else is printed."""
        out, _ = self.program.communicate(timeout=PATIENCE_S)
        assert out == ""
        return self.program.returncode, self.errors.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""

        def holds() -> bool:
            assert self.program.poll() is None, self.errors.read_text()
            return condition()

        wait_until(holds, self.errors.read_text)

    def results(self) -> int:
        """The number of results in the output file."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        try:
            return self.processes.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _compared(path: Path) -> list[Any]:
    """The part that must not depend on a cluster: all but figures of time and memory."""
    found = []
    for record in records(path.read_text()):
        for figures in ("timings", "memory", "speculation"):
            record.pop(figures, None)
        if "custom_id" in record:
            del record["response"]["body"]["created"]
        found.append(record)
    return found


@pytest.fixture
def batch(short_path: Path, tmp_path: Path) -> Iterator[Callable[..., Batch]]:
    """Starts batches with the small model; they are ended at the end of the test."""
    begun: list[Batch] = []

    def begin(
        *flags: str, lines: list[Any] = LINES, output: str = "out.jsonl", model: Any = short_path
    ) -> Batch:
        begun.append(Batch(model, lines, tmp_path / output, *flags))
        return begun[-1]

    yield begin
    for each in begun:
        if each.program.poll() is None:
            for process in [*each.children(), each.processes]:
                process.kill()
            each.program.communicate()


@pytest.fixture(scope="module")
def known() -> list[Any]:
    """For the results of the lines, once a test has found them out."""
    return []


@pytest.fixture
def expected(batch: Callable[..., Batch], known: list[Any]) -> list[Any]:
    """The results of the lines without a cluster."""
    if not known:
        alone = batch(output="alone.jsonl")
        assert alone.end()[0] == 1  # two of the lines are failures
        known += _compared(alone.output)
    return known


class _Nodes:
    """A cluster of two nodes; see tests/ray_nodes.py."""

    def __init__(self, folder: Path) -> None:
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.program.stdout is not None
        self.address = self.program.stdout.readline().strip()

    def engines(self) -> list[psutil.Process]:
        """The processes in which engines run."""
        children = psutil.Process(self.program.pid).children(recursive=True)
        return [process for process in children if "ray::MapWorker" in _title(process)]

    def end_second(self) -> None:
        """Let the second node crash."""
        assert self.program.stdin is not None
        self.program.stdin.write("end\n")
        self.program.stdin.flush()

    def end(self) -> None:
        """End the cluster."""
        self.program.communicate(timeout=PATIENCE_S)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Nodes]:
    with tempfile.TemporaryDirectory(prefix="edgespec-nodes-", dir="/tmp") as folder:  # a short path
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listens on loopback alone
        cluster = _Nodes(tmp_path / "second")
        yield cluster
        cluster.end()


def test_nodes_may_lack_the_model_and_may_be_lost(
    nodes: _Nodes, batch: Callable[..., Batch], short_path: Path
) -> None:
    """Each node looks a name up for itself, and the lines of one that crashes are answered by the other."""
    models = Path(os.environ["XDG_DATA_HOME"]) / "edgespec" / "models"
    models.mkdir(parents=True)
    (models / "short.gguf").symlink_to(short_path)
    lines = [{"id": number, "prompt": f"Count to {number}.", "max_tokens": 100} for number in range(60)]
    code, err = batch("--ray", nodes.address, lines=lines, output="named.jsonl", model="short").end()
    assert code == 1
    assert f"Error: Node {socket.gethostname()}" in err
    assert "There is no model 'short'." in err

    running = batch("--ray", nodes.address, lines=lines)
    running.wait_for(lambda: running.results() >= 1)
    nodes.end_second()
    code, err = running.end()
    assert code == 0, err
    assert [record["id"] for record in records(running.output.read_text())] == list(range(60))


def test_a_killed_engine_leaves_its_lines_to_others(
    nodes: _Nodes, batch: Callable[..., Batch], expected: list[Any]
) -> None:
    """One of two engines is held, so that it has lines for certain, and then killed."""
    running = batch("--ray", nodes.address)
    running.wait_for(lambda: len(nodes.engines()) == 2)
    held = nodes.engines()[0]
    held.suspend()
    running.wait_for(lambda: running.results() >= 5)  # of the other engine, and of the invalid line
    held.kill()
    code, err = running.end()
    assert code == 1, err
    assert "Lost an engine. Asking " in err
    assert _compared(running.output) == expected


def test_a_batch_continues_with_and_without_a_cluster(
    nodes: _Nodes, batch: Callable[..., Batch], expected: list[Any]
) -> None:
    on_cluster = ["--ray", nodes.address]
    for flags, lines in ((on_cluster, LINES[:5]), ([], LINES[:10]), (on_cluster, LINES)):
        running = batch(*flags, lines=lines)
        code, err = running.end()
        assert (code, " already done" in err) == (1, lines != LINES[:5]), err
    assert _compared(running.output) == expected


def test_ctrl_c_ends_a_batch_on_a_cluster(nodes: _Nodes, batch: Callable[..., Batch]) -> None:
    lines = [{"prompt": f"Count to {number}.", "max_tokens": 200} for number in range(50)]
    running = batch("--ray", nodes.address, lines=lines)
    running.wait_for(lambda: running.results() >= 1)
    os.killpg(running.program.pid, signal.SIGINT)  # as a terminal does: every process gets it
    code, err = running.end()
    assert code == 130
    assert "Interrupted" in err
    assert "Traceback" not in err
    assert 1 <= running.results() < 50


def test_a_wrong_address_is_told_at_once(batch: Callable[..., Batch]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, err = batch("--ray", f"127.0.0.1:{port}").end()
    assert code == 1
    assert err.startswith(f"Error: There is no Ray cluster at 127.0.0.1:{port}: ")
