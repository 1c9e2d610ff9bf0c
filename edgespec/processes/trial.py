"""Trying native code in a child process first, because a crash would end this one.

The child's memory, processor time and stack are limited, so whatever succeeds there is safe to do here. If
the child dies, that is the verdict.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import BackendError

# Python starts slowly on a busy machine. Once a child is running, its processor time is limited first.
_STARTING_S = 60.0
_STACK_BYTES = 2 << 20  # a quarter of the usual stack size
_BOOT = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from importlib import import_module\n"
    "from edgespec.processes.trial import serve\n"
    "serve(import_module(sys.argv[2]).attempt)\n"
)
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",  # each thread's arena would reserve 64 MiB, which the limit counts
    "GGML_NO_BACKTRACE": "1",  # ggml would start a debugger, which would outlive the child
}

Why = Literal["crash", "time", "memory"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt.

    Attributes:
        answer: what it returned; None if the child died first.
        why: what ended the child, if anything did.
        detail: for messages, such as "SIGSEGV".
    """

    answer: Mapping[str, Any] | None
    why: Why | None = None
    detail: str = ""


def attempt_in_child(
    module: str,
    request: Mapping[str, Any],
    *,
    cpu_s: float,
    memory_bytes: int | None = None,
    stack_bytes: int = _STACK_BYTES,
) -> Verdict:
    """Call `attempt(request)` of a module in a process of its own.

    Args:
        module: its full name; its `attempt` takes a mapping and returns one, both of them JSON.
        cpu_s: seconds of processor time that the attempt may take.
        memory_bytes: memory that it may take beyond what the child holds after its imports; None for no
            limit.
        stack_bytes: the stack that the attempt runs on.

    Raises:
        BackendError: no child process can be started.
    """
    limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "stack_bytes": stack_bytes}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BOOT, json.dumps([p or str(Path.cwd()) for p in sys.path]), module],
            input=json.dumps({"limits": limits, "request": request}).encode(),
            capture_output=True,
            timeout=_STARTING_S + 4 * cpu_s,
            env={**os.environ, **_ENVIRONMENT},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except subprocess.TimeoutExpired:
        return Verdict(None, "time")
    except OSError as error:
        raise BackendError(
            f"No process can be started to try this out: {error.strerror or error}.",
            "Close other programs, or raise the limit on processes.",
        ) from error
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return _ended(done.returncode, done.stderr)
    if isinstance(answer, dict) and answer.get("out_of_memory"):
        return Verdict(None, "memory")
    return Verdict(answer) if isinstance(answer, dict) else _ended(done.returncode, done.stderr)


def serve(attempt: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """The child's side: read a request, apply its limits, answer."""
    order = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)  # so that output of libraries does not mix with the answer
    _limit(order["limits"])
    answers: list[Mapping[str, Any]] = []

    def run() -> None:
        try:
            answers.append(attempt(order["request"]))
        except MemoryError:
            answers.append({"out_of_memory": True})

    threading.stack_size(order["limits"]["stack_bytes"])
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if answers:
        os.write(out, json.dumps(answers[0]).encode())
    sys.stderr.flush()
    os._exit(0 if answers else 1)  # without running destructors of native code


def _limit(limits: Mapping[str, Any]) -> None:
    try:
        import resource
    except ImportError:
        return  # Windows: only the parent's time limit applies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if limits["memory_bytes"] is not None:
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (nothing else is imported here)
                mapped = int(file.read().split()[0]) * resource.getpagesize()
            most = mapped + limits["memory_bytes"] + limits["stack_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        except (OSError, ValueError):
            pass  # not on this system: only the limit on time applies


def _ended(code: int, errors: bytes) -> Verdict:
    if code == -getattr(signal, "SIGXCPU", 0) or code == -getattr(signal, "SIGKILL", 0):
        return Verdict(None, "time")
    if b"memory allocation of" in errors or b"bad_alloc" in errors or b"MemoryError" in errors:
        return Verdict(None, "memory")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"status {code}"
    return Verdict(None, "crash", name)
