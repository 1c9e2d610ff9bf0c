"""The terminal's modes: no echo while answers are shown, and the shell's own while we are suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from edgespec.cli.screen.terminal import is_terminal

# The modes in which the shell left the terminal, while `without_echo` is in force.
_found: list[Any] | None = None


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """While this lasts, keys pressed are kept for later and do not mix with what is being shown.

    Ctrl-Z stops the program at once, and shells then set their own modes; when `fg` brings the program
    back, echo is switched off again.
    """
    global _found
    if not is_terminal(sys.stdin) or os.name != "posix":
        yield
        return
    import termios

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    outermost = _found is None
    if outermost:
        _found = before

    def silence(*_: object) -> None:
        after = termios.tcgetattr(keys)
        after[3] &= ~termios.ECHO
        termios.tcsetattr(keys, termios.TCSADRAIN, after)

    in_main = threading.current_thread() is threading.main_thread()  # Python delivers signals nowhere else
    earlier = signal.signal(signal.SIGCONT, silence) if in_main else None
    silence()
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGCONT, signal.SIG_DFL if earlier is None else earlier)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        if outermost:
            _found = None


def suspend() -> None:
    """Stop as Ctrl-Z does, with the terminal as it was found; returns once `fg` has brought the program back.

    For programs that read keys one by one, where the terminal does not turn Ctrl-Z into a signal.
    """
    import termios

    keys = sys.stdin.fileno()
    now = termios.tcgetattr(keys)
    if _found is not None:
        termios.tcsetattr(keys, termios.TCSADRAIN, _found)
    # The whole group: a program that started this one, and waits for it, has to stop as well.
    os.killpg(0, signal.SIGTSTP)
    termios.tcsetattr(keys, termios.TCSADRAIN, now)
