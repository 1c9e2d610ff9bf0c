"""Workers on this machine, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from tests.waiting import PATIENCE_S


class LocalWorker:
    """`edgespec worker` as a process of its own, on a free port of the loopback.

    Attributes:
        address: "host:port".
        devices: what it says that it lends.
    """

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edgespec",
                "worker",
                "--listen",
                "127.0.0.1:0",
                "--json",
                "--quiet",
                *options,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        self.address: str = said["address"]
        self.devices: list[dict[str, object]] = said["devices"]

    @property
    def pid(self) -> int:
        """Arguments of the program; the server is its child."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, with the server process that it started, as a power cut would.

        Nothing happens if it has ended.
        """
        if sys.platform == "win32":
            self._process.kill()  # with which the server ends
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._ended()

    def stop(self) -> int:
        """Ctrl-C, which Windows sends to consoles only: there it is ended; returns the exit code."""
        if self._process.poll() is None:
            if sys.platform == "win32":
                self._process.terminate()
            else:
                self._process.send_signal(signal.SIGINT)
        return self._ended()

    def _ended(self) -> int:
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
