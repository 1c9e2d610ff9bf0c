"""What is said while scripts/setup.py works: what is being done, for how long, and how long it will take."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

REPORT_S = 15.0  # between two reports of how far a compilation is, where they are lines of their own
_REFRESH_S = 1.0  # between two of them in the last line of a terminal
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True)
class Step:
    """Something that is being done.

    Attributes:
        start: by the clock of time.monotonic.
        log: where what is compiled is counted; None if nothing is.
    """

    name: str
    start: float
    log: Path | None

    def state(self) -> str:
        """How far it is, for people; empty if that is not known."""
        n_done, n_all = compiled_files(self.log) if self.log is not None else (0, 0)
        if not 0 < n_done < n_all:
            return ""
        left = (time.monotonic() - self.start) * (n_all - n_done) / n_done
        rest = f", about {duration(left)} more" if 10 * n_done > n_all else ""  # files differ in size
        return f"{n_done} of {n_all} files{rest}"


class Progress:
    """Says what begins and what is done, with the time that it took.

    On a terminal, the last line shows all that is being done; elsewhere, lines say how far a compilation is.
    """

    def __init__(self, *, quiet: bool = False, output: TextIO | None = None) -> None:
        self._quiet = quiet
        self._output = output or sys.stdout
        self._live = not quiet and self._output.isatty()
        self._start = time.monotonic()
        self._steps: list[Step] = []
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        if not self._quiet:
            with self._lock:
                print(f"{_CLEAR if self._live else ''}{text}", file=self._output, flush=True)

    def end(self, text: str) -> None:
        self.say(f"{text}, after {duration(time.monotonic() - self._start)}.")

    def during(self, name: str, text: str, action: Callable[[], bool], log: Path | None = None) -> bool:
        """Say that something begins, do it, and say how long it took; returns whether it worked.

        Args:
            log: what is compiled is counted there, so that it is said how far that is.
        """
        self.say(f"{name}: {text}")
        step = Step(name, time.monotonic(), log)
        done = threading.Event()
        watching = threading.Thread(target=self._watch, args=(step, done), daemon=True)
        with self._lock:
            self._steps.append(step)
        watching.start()
        try:
            worked = action()
        finally:
            done.set()
            watching.join()
            with self._lock:
                self._steps.remove(step)
        if worked:
            self.say(f"{name}: done in {duration(time.monotonic() - step.start)}")
        return worked

    def _watch(self, step: Step, done: threading.Event) -> None:
        while not done.wait(_REFRESH_S if self._live else REPORT_S):
            if self._live:
                self._refresh()
            elif state := step.state():
                self.say(f"{step.name}: {state}")

    def _refresh(self) -> None:
        with self._lock:
            parts = [
                f"{step.name} ({state})" if (state := step.state()) else step.name for step in self._steps
            ]
            line = f"{duration(time.monotonic() - self._start)}: {', '.join(parts)}"
            print(f"{_CLEAR}{line[:79]}", end="", file=self._output, flush=True)


def compiled_files(log: Path) -> tuple[int, int]:
    """The files that the build has compiled, and those that it will, as Ninja counts them in its output."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 14)))
            counts = re.findall(rb"\[(\d+)/(\d+)\]", file.read())
    except OSError:
        counts = []
    return (int(counts[-1][0]), int(counts[-1][1])) if counts else (0, 0)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
