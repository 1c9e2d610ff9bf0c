"""The status line: shows at the bottom of the terminal what is going on, and disappears afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from edgespec.printable import printable

_A_MOMENT_S = 0.25
_FRAME_S = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 20  # characters
_GUESS_S, _SOON_S, _LATER_S = 3.0, 10.0, 30.0
_WIDE = 70

_shown: StatusLine | None = None  # the one whose line is shown


class RemainingTime:
    """The time that something will still take, estimated from how much of it is done.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._said = clock()
        self._patience = _SOON_S

    def left(self, fraction: float) -> str:
        """Format the time left, as in ", 0:40 left".

        Empty while it would be a guess, and for what takes only seconds in all.
        """
        seconds = self._clock() - self._start
        if seconds < _GUESS_S or not 0 < fraction < 1 or seconds / fraction < _SOON_S:
            return ""
        return f", about {format_seconds(seconds / fraction * (1 - fraction))} left"

    def is_due(self) -> bool:
        """True if a line should be printed where there is no status line: after 10 s, then every 30."""
        now = self._clock()
        if now - self._said < self._patience:
            return False
        self._said, self._patience = now, _LATER_S
        return True


class StatusLine:
    """The line, with a spinner, cut to the current width of the window."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self._text = ""
        self._not_before = 0.0
        self._drawn = ""
        self._columns = 0
        self._frame = 0
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._prefill_from = 0.0

    def progress(self, what: str, fraction: float, more: str = "") -> None:
        """Show how much of something is done, and what else there is to say of it."""
        self.say(f"{what} {fraction:.0%}{more}" if fraction > 0 else what)

    def say(self, text: str) -> None:
        """Show a text."""
        self._show(text, 0.0)

    def waiting(self, text: str) -> None:
        """Show a text if nothing else happens within a moment."""
        self._show(text, _A_MOMENT_S)

    def prefill(self, done: int, total: int) -> None:
        """Show how much of the prompt was read, and how long the rest will take."""
        if not done:
            self._prefill_from = time.monotonic()
        self.say(format_prefill(done, total, time.monotonic() - self._prefill_from, _columns()))

    def clear(self) -> None:
        """Remove the line."""
        global _shown
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        _shown = None
        with self._lock:
            self.erase()

    def erase(self) -> None:
        """Erase the line until it is drawn again."""
        with self._lock:
            if self._drawn:
                _write(self._back(_columns()))
                self._drawn = ""

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Hide the line while the block runs."""
        with self._lock:
            self.erase()
            yield

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _show(self, text: str, delay: float) -> None:
        global _shown
        if not self.shown:
            return
        with self._lock:
            self._text = " ".join(printable(text).split("\n"))
            self._not_before = time.monotonic() + delay if delay else 0.0
        if self._thread is None:
            _shown = self
            self._ended.clear()
            self._thread = threading.Thread(target=self._spin, daemon=True)
            self._thread.start()

    def _spin(self) -> None:
        while True:
            with self._lock:
                if time.monotonic() >= self._not_before:
                    self._draw()
            if self._ended.wait(_FRAME_S):
                return

    def _draw(self) -> None:
        columns = _columns()
        self._frame = (self._frame + 1) % len(_FRAMES)
        line = f"{_FRAMES[self._frame]} {self._text}"
        back = self._back(columns)
        self._drawn, self._columns = _cut(line, columns - 1), columns
        _write(f"{back}{self._drawn}")

    def _back(self, columns: int) -> str:
        """The escape sequence that moves to the beginning of the line and erases it."""
        # A window that became narrower has wrapped the line.
        narrower = bool(self._drawn) and 0 < columns < self._columns
        folds = (_width(self._drawn) - 1) // columns if narrower else 0
        return (f"\x1b[{folds}A" if folds else "") + "\r\x1b[J"


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Hide the line while the block runs, so that something else can be printed in its place."""
    status = _shown
    if status is None:
        yield
        return
    with status.away():
        yield


def format_prefill(done: int, total: int, seconds: float, columns: int = 80) -> str:
    """Format the progress of a prompt: figures, the time left, and a bar if there is room."""
    full = round(_BAR * done / total) if total else _BAR
    bar = "━" * full + "─" * (_BAR - full) + " " if columns >= _WIDE else ""
    text = f"Reading the prompt {bar}{done} of {total}"
    return f"{text}, {format_seconds(seconds / done * (total - done))} left" if 0 < done < total else text


def format_seconds(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _cut(text: str, columns: int) -> str:
    if _width(text) <= columns:
        return text
    while text and _width(text) >= columns:
        text = text[:-1]
    return text + "…"


def _width(text: str) -> int:
    """Columns that a text takes; some characters take two."""
    from rich.cells import cell_len

    return cell_len(text)


def _columns() -> int:
    try:  # the current width; the variable COLUMNS does not follow a window that is resized
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the program
        sys.stderr.write(text)  # noqa: TID251 (control sequences of its own)
        sys.stderr.flush()
