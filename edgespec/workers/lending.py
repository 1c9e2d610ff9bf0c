"""Lending this machine to others: the server process, watched and started again if it crashes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.base.installation import install_command
from edgespec.errors import BackendError, UsageError
from edgespec.kernels.ggml import rpc
from edgespec.kernels.ggml.structs import UnsupportedBuild
from edgespec.machine.probe import available_memory
from edgespec.processes.children import ChildProcess, end_with_standard_input, python_command, start
from edgespec.processes.exit_status import describe_exit

REBUILD = f"Compile it with its RPC backend: {install_command(rebuild=True)}"

_CONNECTED, _LEFT = "Accepted client connection", "Client connection closed"
_STARTING_S = 60.0
_HEALTHY_S = 5.0  # a server that lives this long has not crashed because of where it runs
_MAX_CRASHES = 3
_LOOKING_S = 1.5


@dataclass(frozen=True)
class LendingOffer:
    """The devices that are lent, and the address."""

    host: str  # as an IPv4 address
    port: int
    threads: int
    memory: int | None = None  # bytes of this machine's memory; None for what is available


class LendingServer:
    """A server that lends this machine's devices; closed in the end.

    Args:
        say: called with a sentence when a client comes or goes, and when the server crashed.

    Attributes:
        devices: name, description, and bytes of memory, "free" and "total".

    Raises:
        BackendError: llama.cpp has no RPC here, or does not start.
        UsageError: the address is taken, or not allowed.
    """

    def __init__(self, offer: LendingOffer, say: Callable[[str], None]) -> None:
        self._offer = offer
        self._say = say
        self._came_at: float | None = None  # when the present client connected
        self._in_use = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = self._start()
        self.devices = self._announced()
        self._wait_until_it_listens()

    def serve(self) -> None:
        """Report what happens until the server cannot continue; Ctrl-C raises KeyboardInterrupt as usual.

        Raises:
            BackendError: the server crashes again and again.
        """
        crashes, begun = 0, time.monotonic()
        while True:
            self._report_use()
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.5)  # short, so that signals are handled on every system
                if line is not None:
                    self._note_client(line)
                    continue
                self._note_client(_LEFT)
                code = self._process.wait()
                crashes = 0 if time.monotonic() - begun > _HEALTHY_S else crashes + 1
                if code in (NO_ADDRESS, NO_RPC) or crashes >= _MAX_CRASHES:
                    raise self._failure(code)
                self._say(f"llama.cpp {describe_exit(code)} while it served a program. Listening again.")
                begun = time.monotonic()
                self._process = self._start()

    def close(self) -> None:
        """End the server, with all connections."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LendingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> ChildProcess:
        process = start(
            python_command(__name__, json.dumps(vars(self._offer))),
            variables={"GGML_NO_BACKTRACE": "1"},  # ggml would start a debugger
            with_parent=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: ChildProcess) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _announced(self) -> list[dict[str, Any]]:
        try:
            line = self._lines.get(timeout=_STARTING_S)
            devices: list[dict[str, Any]] = json.loads(line or "")["devices"]
            return devices
        except (queue.Empty, ValueError, KeyError):
            self.close()
            raise self._failure(self._process.returncode) from None

    def _wait_until_it_listens(self) -> None:
        """Return when programs can connect, or the server has ended: llama.cpp does not say when it does."""
        end = time.monotonic() + _STARTING_S
        host = "127.0.0.1" if self._offer.host == "0.0.0.0" else self._offer.host
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection((host, self._offer.port), 1.0):
                return
            time.sleep(0.02)

    def _note_client(self, line: str) -> None:
        if line == _CONNECTED:
            self._came_at = time.monotonic()
        elif line == _LEFT:
            self._came_at = None
            if self._in_use:
                self._in_use = False
                self._say("The program is done; its memory is free again.")

    def _report_use(self) -> None:
        """Say that a program uses this machine; those that only look at it come and go within a second."""
        staying = self._came_at is not None and time.monotonic() - self._came_at > _LOOKING_S
        if staying and not self._in_use:
            self._in_use = True
            self._say("A program is using this machine.")

    def _failure(self, code: int) -> BackendError | UsageError:
        if code == NO_RPC:
            return BackendError("This llama.cpp build cannot lend devices: it has no RPC.", REBUILD)
        if code == NO_ADDRESS:
            return UsageError(
                f"Cannot listen on {self._offer.host}:{self._offer.port}.",
                "Choose another address with --listen.",
            )
        return BackendError(f"llama.cpp {describe_exit(code)}.", "Run 'edgespec doctor'.")


NO_ADDRESS, NO_RPC = 4, 5
"""Exit codes: no listening at the address; a llama.cpp build without RPC. On Windows, abort gives 3."""

_MARGIN = 0.05  # of available memory, left for other programs


def lendable_bytes(limit: int | None) -> int:
    """Memory of this machine that may be lent now."""
    free = int(available_memory() * (1 - _MARGIN))
    return free if limit is None else min(limit, free)


def main() -> None:
    """Serve until the parent ends."""
    order = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends this
    end_with_standard_input()
    if not rpc.has_rpc():
        os._exit(NO_RPC)
    try:
        devices = rpc.own_devices()
        limit = rpc.LimitedMemory(
            devices[-1], lambda: lendable_bytes(order["memory"]), lambda: lendable_bytes(None), _tell
        )
        facts = [rpc.describe(device) for device in devices]
        print(json.dumps({"devices": [vars(fact) for fact in facts]}), flush=True)
        rpc.lend(f"{order['host']}:{order['port']}", devices, order["threads"])
    except UnsupportedBuild as error:
        print(error, file=sys.stderr)
        os._exit(NO_RPC)
    del limit
    os._exit(NO_ADDRESS)


def _tell(error: Exception) -> None:
    """Say why nothing is lent for now."""
    print(f"Free memory is unknown, so none is lent: {error}", file=sys.stderr, flush=True)
