"""The status line: shows at the bottom of the terminal what is going on, and disappears afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_A_MOMENT_S = 0.25
_FRAMES_PER_S = 10
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 20  # characters
_GUESS_S, _SOON_S, _LATER_S = 3.0, 10.0, 30.0
_WIDE = 70


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
    """A line with a spinner at the bottom of the window.

    Args:
        console: where it is shown; None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._live: Live | None = None
        self._text = ""
        self._not_before = self._prefill_from = 0.0

    @property
    def shown(self) -> bool:
        """True if a person sees the line."""
        return self._console is not None

    def progress(self, what: str, fraction: float, more: str = "") -> None:
        """Show how much of something is done, and what else there is to say of it."""
        self.say(f"{what} {fraction:.0%}{more}" if fraction > 0 else what)

    def say(self, text: str) -> None:
        self._show(text, 0.0)

    def waiting(self, text: str) -> None:
        """Show a text if nothing else happens within a moment."""
        self._show(text, time.monotonic() + _A_MOMENT_S)

    def prefill(self, done: int, total: int) -> None:
        """Show how much of the prompt was read, and how long the rest will take."""
        if not done:
            self._prefill_from = time.monotonic()
        columns = self._console.width if self._console is not None else 0
        self.say(format_prefill(done, total, time.monotonic() - self._prefill_from, columns))

    def clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _show(self, text: str, not_before: float) -> None:
        self._text, self._not_before = " ".join(text.split("\n")), not_before
        if self._console is None or self._live is not None:
            return
        from rich.live import Live

        self._live = Live(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,  # answers are written when the line is gone
            redirect_stderr=False,
        )
        self._live.start()
        self._console.show_cursor(True)  # a shell needs it after Ctrl-Z

    def _line(self) -> Text:
        from rich.text import Text

        now = time.monotonic()
        frame = _FRAMES[int(now * _FRAMES_PER_S) % len(_FRAMES)]
        text = f"{frame} {self._text}" if now >= self._not_before else ""
        return Text(text, no_wrap=True, overflow="ellipsis")


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
