"""Progress of a batch: lines done, speed, and the time left."""

from __future__ import annotations

import time

from edgespec.base.units import readable_rate
from edgespec.cli.screen.status import format_seconds

_NOTE_S = 60.0


class BatchProgress:
    """Progress of a batch, and the time that the rest will take.

    Args:
        lines: of the input; 0 if unknown.

    Attributes:
        tokens: generated so far.
    """

    def __init__(self, lines: int = 0) -> None:
        self.tokens = 0
        self._lines = lines
        self._passed = self._done = 0
        self._open: dict[int, int] = {}  # line -> answers that are not finished
        self._asked: set[int] = set()  # lines of `_open` of which no more answers will be asked for
        self._start = self._noted = time.monotonic()

    @property
    def line(self) -> int:
        """The first line that has begun and is not finished; 0 if there is none."""
        return min((line for line, answers in self._open.items() if answers), default=0)

    def begun(self, line: int) -> None:
        """Note that a line was read."""
        self._open[line] = 0

    def wanted(self, line: int) -> None:
        """Note that another answer to a line is wanted."""
        self._open[line] += 1

    def asked(self, line: int) -> None:
        """Note that all answers to a line have been asked for."""
        self._asked.add(line)
        self._close_if_finished(line, had_answers=False)

    def done(self, line: int) -> None:
        """Note that an answer to a line is finished."""
        self._open[line] -= 1
        self._close_if_finished(line, had_answers=True)

    def _close_if_finished(self, line: int, *, had_answers: bool) -> None:
        if line in self._asked and not self._open[line]:
            del self._open[line]
            self._asked.remove(line)
            self._passed += 1
            self._done += had_answers

    def place(self) -> str:
        """Describe the progress: '12 of 400 lines, 16 in progress, 27 tokens/s, 3:20 left'."""
        seconds = time.monotonic() - self._start
        of = f" of {self._lines}" if self._lines else ""
        text = f"{self._passed}{of} lines, {sum(self._open.values())} in progress"
        if seconds > 0 and self.tokens:
            text += f", {readable_rate(self.tokens / seconds)}"
        if self._lines and self._done:
            text += f", {format_seconds(seconds / self._done * (self._lines - self._passed))} left"
        return text

    def is_time_for_a_note(self) -> bool:
        """True if to print a note in a log: once in a while."""
        if time.monotonic() - self._noted < _NOTE_S:
            return False
        self._noted = time.monotonic()
        return True
