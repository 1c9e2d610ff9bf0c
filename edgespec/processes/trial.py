"""Trying native code in a child process first, because a crash would end this one.

The child's memory, processor time and stack are limited, so whatever succeeds there is safe to do here. A
child that crashes or exceeds these limits is a verdict on what it tried. A child that was killed, starved,
stopped, or refused memory by the system is none: that raises `InconclusiveTrial`. Waiting for a child is
reported (`progress.report_waiting`), and ends if the listener raises.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any, Literal

from edgespec.base.progress import report_waiting
from edgespec.errors import EdgeSpecError, InconclusiveTrial, MemoryLimitError
from edgespec.processes.children import python_command, start
from edgespec.processes.exit_status import crash_fault, describe_exit, ran_out_of_time, signal_name
from edgespec.processes.limits import limit_trial, memory_is_limited

# Python starts slowly on a busy machine. Once a child is running, its processor time is limited first.
_STARTING_S = 60.0
_WALL_PER_CPU = 4.0
_POLL_S = 0.1
_STACK_BYTES = 2 << 20  # a quarter of the usual stack size
_STARTED = b"started\n"  # the child's first line of output: its limits apply, and the attempt begins
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",  # each thread's arena would reserve 64 MiB, which the limit counts
    "GGML_NO_BACKTRACE": "1",  # ggml would start a debugger, which would outlive the child
}

# What Python, Rust, C++ and ggml print when memory or a thread is refused.
_REFUSALS = (
    b"memory allocation of",
    b"bad_alloc",
    b"MemoryError",
    b"insufficient memory",
    b"failed to allocate",
    b"Cannot allocate memory",
    b"Resource temporarily unavailable",
    b"can't start new thread",
)

Why = Literal["crash", "time", "memory"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt."""

    answer: Mapping[str, Any] | None  # what it returned; None if the child died first
    why: Why | None = None  # what ended the child, if anything did: a crash, or a limit that the caller set
    detail: str = ""  # for messages, such as "segmentation fault"


def attempt_in_child(
    module: str,
    request: Mapping[str, Any],
    *,
    subject: str,
    cpu_s: float,
    memory_bytes: int | None = None,
    stack_bytes: int = _STACK_BYTES,
) -> Verdict:
    """Call `attempt(request)` of a module in a process of its own.

    Args:
        module: its full name; its `attempt` takes a mapping and returns one, both of them JSON. If it raises
            an EdgeSpecError, that is the "error" in the answer.
        subject: what is tried, as the beginning of a sentence.
        cpu_s: seconds of processor time that the attempt may take.
        memory_bytes: memory that it may take beyond what the child holds after its imports; None for no
            limit.
        stack_bytes: the stack that the attempt runs on.

    Raises:
        InconclusiveTrial: the child could not be started, was killed, starved or stopped, or was refused
            memory that it may take.
    """
    limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "stack_bytes": stack_bytes}
    wall_s = _STARTING_S + _WALL_PER_CPU * cpu_s
    done = _run(module, json.dumps({"limits": limits, "request": request}).encode(), subject, wall_s)
    _, started, output = done.stdout.partition(_STARTED)
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and not answer.get("out_of_memory") and not answer.get("too_deep"):
        return Verdict(answer)
    refused = bool(answer and answer.get("out_of_memory")) or any(words in done.stderr for words in _REFUSALS)
    if started and answer and answer.get("too_deep"):
        return Verdict(None, "crash", "RecursionError")
    if started and ran_out_of_time(done.returncode):
        return Verdict(None, "time")
    if started and refused and memory_bytes is not None:
        return Verdict(None, "memory")
    if refused:
        raise InconclusiveTrial(subject, "was refused memory")
    # Code that does not check what it allocates crashes where the system refuses memory. A bus error may be
    # a mapped file that was truncated, or a disk that failed.
    by_system = signal_name(done.returncode) == "SIGBUS" or memory_is_limited()
    fault = crash_fault(done.returncode)
    if started and fault and (memory_bytes is not None or not by_system):
        return Verdict(None, "crash", fault)
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    ended = describe_exit(done.returncode)
    raise InconclusiveTrial(subject, f"{ended}: {last[0]}" if last and done.returncode > 0 else ended)


def _run(module: str, order: bytes, subject: str, wall_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run the child, which dies with this process, and report that it is waited for."""
    command = python_command(__name__, module)
    try:
        child = start(
            command,
            variables=_ENVIRONMENT,
            with_parent=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        reason = f"could not be started ({error.strerror or error})"
        if error.errno in (errno.EAGAIN, errno.ENOMEM):
            raise InconclusiveTrial(subject, reason) from error
        remedy = f"Allow {sys.executable} to be run, and try again."
        raise InconclusiveTrial(subject, reason, remedy) from error
    started_at = time.monotonic()
    # A thread writes the order: `communicate` loses what it has not written when it times out.
    assert child.stdin is not None
    order_pipe, child.stdin = child.stdin, None
    threading.Thread(target=_write, args=(order_pipe, order), daemon=True).start()
    with child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=min(_POLL_S, wall_s))
                except subprocess.TimeoutExpired as error:
                    waited = time.monotonic() - started_at
                    if waited >= wall_s:
                        raise InconclusiveTrial(subject, f"did not end within {wall_s:.0f} s") from error
                    report_waiting(f"Waiting for a child process to try this first: {subject}", waited)
                else:
                    return subprocess.CompletedProcess(command, child.returncode, output, errors)
        except BaseException:
            child.kill()
            raise


def _write(pipe: IO[bytes], order: bytes) -> None:
    """Write an order and close the pipe; a child that has died reads none."""
    with suppress(OSError), pipe:
        pipe.write(order)


def main() -> None:
    """The child's side, whose argument is the module."""
    serve(import_module(sys.argv[1]).attempt)


def serve(attempt: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Read a request, apply its limits, answer."""
    order = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)  # so that output of libraries does not mix with the answer
    limits = order["limits"]
    memory_bytes = limits["memory_bytes"]
    limit_trial(limits["cpu_s"], None if memory_bytes is None else memory_bytes + limits["stack_bytes"])
    answers: list[Mapping[str, Any]] = []

    def run() -> None:
        try:
            answers.append(attempt(order["request"]))
        except (MemoryError, MemoryLimitError):
            answers.append({"out_of_memory": True})  # says nothing of what is tried
        except EdgeSpecError as error:
            answers.append({"error": error.what})
        except RecursionError:
            answers.append({"too_deep": True})

    os.write(out, _STARTED)
    threading.stack_size(limits["stack_bytes"])
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if answers:
        os.write(out, json.dumps(answers[0]).encode())
    sys.stderr.flush()
    os._exit(0 if answers else 1)  # without running destructors of native code
