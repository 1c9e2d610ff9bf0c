"""Deferring signal handlers while C code calls back into Python.

Python runs signal handlers in the main thread, at the next Python instruction. During a long C call, that is
the first instruction of a callback, before any `try` in it. An exception raised there never reaches the
caller: ctypes prints it and returns zero to C, which continues as if the callback had done its work. So
handlers are deferred until such a call has returned.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Those that programs handle in Python. SIGINT comes first, so that Ctrl-C cannot interrupt replacing the
# others.
_SIGNALS = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGQUIT",
        "SIGBREAK",
        "SIGALRM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGVTALRM",
        "SIGPROF",
    )
    if hasattr(signal, name)
)


class DeferredSignals:
    """A block in which no Python signal handler runs; the handlers of signals that arrive run at its end.

    Outside the main thread, where Python runs no handlers, this does nothing.

    Args:
        on_interrupt: called at once when a signal arrives that will raise KeyboardInterrupt at the end.

    Attributes:
        interrupted: whether such a signal has arrived.
    """

    def __init__(self, on_interrupt: Callable[[], None] = lambda: None) -> None:
        self.interrupted = False
        self._on_interrupt = on_interrupt
        self._handlers: dict[int, Any] = {}
        self._arrived: list[tuple[Any, int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
            except BaseException:  # a handler that was not replaced yet
                self._put_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()
        self._run_handlers()

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        self._arrived.append((handler, number, frame))
        if handler is signal.default_int_handler and not self.interrupted:
            self.interrupted = True
            self._on_interrupt()

    def _put_back(self) -> None:
        if not self._handlers:
            return
        number = next(reversed(self._handlers))
        try:
            signal.signal(number, self._handlers[number])
        finally:  # a restored handler may raise at once
            del self._handlers[number]
            self._put_back()

    def _run_handlers(self) -> None:
        if not self._arrived:
            return
        handler, number, frame = self._arrived.pop(0)
        try:
            if handler is not None:
                handler(number, frame)
        finally:
            self._run_handlers()
