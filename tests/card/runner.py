"""What the steps of a run share: child processes, the time that is left, and the file of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.card.build import Built
from tests.card.device import STAND_IN

_ROOT = Path(__file__).resolve().parents[2]
_SAID = 12  # lines of a child that failed
_SHARE = 0.2  # of a run's time that one step may take
_LEAST_S = 30.0


class Runner:
    """Runs the steps in child processes, as llama.cpp ends a process in which a card fails.

    Args:
        minutes: after which no further step is begun. No step may take more than a fifth of them.
        folder: for what is measured and learned, so that this machine's own profiles stay as they are.
        results_path: of the JSON file.

    Attributes:
        results: what is known so far.
        faults: steps that failed.
    """

    def __init__(self, built: Built, minutes: float, results_path: Path, folder: Path) -> None:
        self.results: dict[str, Any] = {"build_s": built.seconds, "architecture": built.architecture}
        self.faults = 0
        self._seconds = 60 * minutes
        self._path = results_path
        self._begun = time.monotonic()
        self._helpers: list[subprocess.Popen[str]] = []
        path = [str(built.site.resolve()), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "XDG_CACHE_HOME": str((folder / "cache").resolve()),
        }

    def child(self, module: str, *arguments: str, extra: dict[str, str] | None = None) -> Any:
        """The JSON that a program prints; {"error": ...} if it fails."""
        left = self._seconds - (time.monotonic() - self._begun)
        limit = max(min(left, _SHARE * self._seconds), _LEAST_S)
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
                env=self._environment | (extra or {}),
            )
        except subprocess.TimeoutExpired:
            self.faults += 1
            return {"error": f"took more than {limit:.0f} s"}
        try:
            found = json.loads(done.stdout)
        except ValueError:
            self.faults += 1
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            causes = [line for line in said if "rror" in line]  # before the stack, where ggml prints one
            return {"error": f"ended with {done.returncode}: " + " / ".join((causes or said)[-_SAID:])}
        if isinstance(found, dict):
            found["process_s"] = time.perf_counter() - begun
        return found

    def stand_in(self) -> dict[str, Any]:
        """Start a worker on the loopback that stands in for a card."""
        command = ["worker", "--listen", "127.0.0.1:0", "--json", "--quiet", "--threads", "1"]
        said = json.loads(self._start("edgespec", *command)[1])
        self._environment[STAND_IN] = said["address"]
        return {"name": "RPC0", "description": "a worker that stands in for a card"}

    def hold(self, device: str, left: int) -> tuple[subprocess.Popen[str], str]:
        """Take a card's memory until so many bytes are free; returns the process, and what it said."""
        return self._start("tests.card.device", device, str(left))

    def end(self, helper: subprocess.Popen[str] | None) -> None:
        """End a process that was started."""
        if helper is not None and helper in self._helpers:
            helper.terminate()
            helper.wait(30)
            self._helpers.remove(helper)

    def close(self) -> None:
        """End all that were started."""
        for helper in list(self._helpers):
            self.end(helper)

    def has_time(self, label: str) -> bool:
        """False, and a line, if the time is up."""
        left = self._seconds - (time.monotonic() - self._begun)
        if left <= 0:
            self.say(f"no time is left for: {label}")
        return left > 0

    def save(self) -> None:
        """Write what is known so far."""
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1), "utf-8")
        partial.replace(self._path)

    def say(self, line: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self._begun:6.1f} s] {line}", flush=True)

    def _start(self, module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """Start a process, and wait for its first line."""
        helper = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self._helpers.append(helper)
        assert helper.stdout is not None
        return helper, helper.stdout.readline().strip()
