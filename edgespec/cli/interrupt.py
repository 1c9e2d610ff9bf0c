"""Ctrl-C stops the answer, not the program.

A Python signal handler runs only when the current C call returns, and a pass of a streamed model takes
seconds. So the signal also wakes a thread, through the descriptor to which Python's C handler writes, and
that thread cancels the answer at once.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

_T = TypeVar("_T")

# Of services, and of Ctrl-Break on Windows.
ENDING = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGBREAK") if hasattr(signal, name))


class Cancellable(Protocol):
    """An activity that can be stopped from another thread."""

    def cancel(self) -> None:
        """End the running answer."""


class Interruption:
    """A signal's arrival, and its number.

    Attributes:
        signal: its number; 0 if there was none yet.
    """

    def __init__(self) -> None:
        self.signal = 0

    def reach(self, answer: _T, engine: Cancellable) -> _T:
        """Cancel an answer that was just asked for if the signal came before; returns the answer."""
        if self:
            engine.cancel()
        return answer

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """The conventional exit code of a program that this signal ended: 130 for Ctrl-C."""
        return 128 + self.signal


@contextmanager
def cancelling(engine: Cancellable, *signals: signal.Signals) -> Iterator[Interruption]:
    """Cancel the engine's answer on SIGINT and `signals` while the block runs.

    A second signal raises KeyboardInterrupt. Outside the main thread, where Python delivers no signals,
    this does nothing.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if interruption:
            raise KeyboardInterrupt
        interruption.signal = number
        engine.cancel()

    watched = {signal.SIGINT, *signals}
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, watched, engine), daemon=True)
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    earlier = {number: signal.signal(number, on_signal) for number in watched}
    watcher.start()
    try:
        yield interruption
    finally:
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(earlier_fd)
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket, watched: set[signal.Signals], engine: Cancellable) -> None:
    """Cancel the answer when a watched signal's number is read, until the other end is closed."""
    while numbers := reader.recv(64):
        if not watched.isdisjoint(numbers):
            engine.cancel()
