"""The process that renders chat templates: one line of JSON in, one out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import TemplateError
from edgespec.processes.children import start
from edgespec.processes.limits import ChildMemory, end_with_this_process

MAX_OUTPUT_CHARS = 16 * 2**20
OTHER_FILE = "Try another GGUF file of this model; the template is part of the file."

_WORKER = Path(__file__).with_name("template_worker.py")
# A cold start reads Python and jinja2 from disk, which may be slow and busy. This time does not count
# towards the template's own.
_START_TIMEOUT_S = 60.0
# In addition to what the process has after its imports. Compiling a template and rendering short messages
# takes a few MiB; long messages are held about a dozen times: as JSON, as text, and as pieces of the result.
_MEMORY_BYTES = 48 * 2**20
_BYTES_PER_REQUEST_BYTE = 16
_MAX_MEMORY_BYTES = 512 * 2**20
_MAX_ANSWER_BYTES = 12 * MAX_OUTPUT_CHARS + 1024  # JSON escapes take up to 12 bytes a character


class TemplateProcess:
    """The child process: one line of JSON in, one out."""

    def __init__(self) -> None:
        jinja = importlib.util.find_spec("jinja2")
        # An isolated interpreter skips the user's site-packages, and jinja2 may be installed there.
        folder = [str(Path(jinja.origin).parents[1])] if jinja and jinja.origin else []
        try:
            self._process = start(
                [sys.executable, "-I", str(_WORKER), *folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        end_with_this_process(self._process)
        self._memory: ChildMemory | None = None  # once it is ready

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to `request`. After any exception this worker must be closed."""
        if self._memory is None:
            self._memory = self._await_ready()
        line = json.dumps(request).encode() + b"\n"
        self._memory.limit(min(_MEMORY_BYTES + _BYTES_PER_REQUEST_BYTE * len(line), _MAX_MEMORY_BYTES))
        try:
            answer = _decoded(_within(timeout_s, lambda: self._exchange(line)))
        except TimeoutError:
            raise TemplateError(
                f"The model's chat template did not finish within {timeout_s:g} s.", OTHER_FILE
            ) from None
        if answer is None:
            raise TemplateError(
                "The process that renders the model's chat template crashed.",
                OTHER_FILE,
            )
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # it may not have read everything
                if pipe is not None:
                    pipe.close()

    def _await_ready(self) -> ChildMemory:
        try:
            answer = _decoded(_within(_START_TIMEOUT_S, lambda: self._exchange(b"")))
        except TimeoutError:
            raise _not_started(f"no answer within {_START_TIMEOUT_S:g} s") from None
        if answer is None or not answer.get("ready"):
            raise _not_started(str((answer or {}).get("error", "it exited at once")))
        return ChildMemory(self._process)

    def _exchange(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer: bytes = self._process.stdout.readline(_MAX_ANSWER_BYTES)
        return answer


def _within(seconds: float, action: Callable[[], bytes]) -> bytes:
    """Return the result of `action`, or b"" if a pipe broke. A thread, as not every system can poll pipes.

    Raises:
        TimeoutError: it took longer; ending the process ends the action too.
    """
    results: list[bytes] = []

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the pipe was closed
            results.append(action())

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    return results[0] if results else b""


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _not_started(why: str) -> TemplateError:
    return TemplateError(
        f"The process that renders chat templates did not start: {why}.",
        "Check this Python installation: python -c 'import jinja2'.",
    )
