"""Child processes with a time limit: installers, servers and the programs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.clients.model import CONTEXT

INSTALL_S, SERVER_S = 900, 180
_ROOT = Path(__file__).resolve().parents[2]
_KEPT = ("PATH", "LANG", "TMPDIR", "TERM")  # of the environment, for the programs


class Failed(Exception):
    """Something did not work; the text says what, in a line."""


@dataclass(frozen=True)
class Done:
    """A program that has ended.

    Attributes:
        output: what it wrote to standard output.
        failure: the last line of what it wrote, if it failed, or that it took too long; empty otherwise.
    """

    output: str
    failure: str


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> Done:
    """Run a program to its end, and all that it starts."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as program:
        try:
            output, errors = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(program)
            output, errors = program.communicate()
            return Done(output, f"no end within {limit_s:.0f} s: {last_line(errors or output)}")
        finally:
            _end(program)
            _end_daemons(environment.get("HOME"))
    failed = f"exit status {program.returncode}: {last_line(errors or output)}" if program.returncode else ""
    return Done(output, failed)


def _end_daemons(home: str | None) -> None:
    """End what a program has left in a session of its own, as cline does; it has the same home folder."""
    if home in {None, os.environ.get("HOME")}:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == home:
                process.kill()


def last_line(text: str) -> str:
    """The last line that says something, without what steers terminals."""
    plain = re.sub(r"\x1b\[[0-?]*[@-~]", "", text)
    lines = [" ".join(line.split()) for line in plain.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it wrote nothing"


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """An environment that knows nothing of the user's own settings."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    folders = {
        f"XDG_{kind}_HOME": str(home / path)
        for kind, path in (
            ("CONFIG", ".config"),
            ("DATA", ".local/share"),
            ("STATE", ".local/state"),
            ("CACHE", ".cache"),
        )
    }
    return {**kept, "HOME": str(home), "NO_PROXY": "127.0.0.1", "NO_COLOR": "1", **folders, **more}


@contextmanager
def scripted_server(model: Path, folder: Path, records: Path) -> Iterator[str]:
    """A server with a scripted model and nothing in its prompt cache; gives its address.

    Raises:
        Failed: it does not start.
    """
    log = folder / "server.log"
    cache = folder / "cache"
    shutil.rmtree(cache / "edgespec" / "prompts", ignore_errors=True)
    options = ["--port", "0", "--name", "scripted", "--alias", "claude-*", "--alias", "gpt-*"]
    options += ["--draft", "none", "--context", str(CONTEXT)]
    command = [sys.executable, "-m", "tests.clients.server", str(records), "serve", str(model), *options]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(cache)}
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as server,
    ):
        try:
            deadline = time.monotonic() + SERVER_S
            while not (match := re.search(r"Serving \S+ at (http://127\.0\.0\.1:\d+)/v1", log.read_text())):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"the server did not start: {last_line(log.read_text())}")
                time.sleep(0.1)
            yield match[1]
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _end(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
