"""Terminal modes: no echo while answers are shown, and the shell's modes while the program is suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from edgespec.cli.screen.terminal import is_terminal

# The terminal's modes before `without_echo`; None outside of it.
_shell_modes: list[Any] | None = None


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Keep typed keys for later while the block runs, so that they do not mix with the output.

    Ctrl-Z stops the program at once, and shells then set their own modes; when `fg` resumes the program,
    echo is switched off again.
    """
    global _shell_modes
    if not is_terminal(sys.stdin) or sys.platform == "win32":
        yield
        return
    import termios

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    outermost = _shell_modes is None
    if outermost:
        _shell_modes = before

    def silence(*_: object) -> None:
        after = termios.tcgetattr(keys)
        after[3] &= ~termios.ECHO
        termios.tcsetattr(keys, termios.TCSADRAIN, after)

    in_main = threading.current_thread() is threading.main_thread()  # the only one that receives signals
    earlier = signal.signal(signal.SIGCONT, silence) if in_main else None
    silence()
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGCONT, signal.SIG_DFL if earlier is None else earlier)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        if outermost:
            _shell_modes = None


def suspend() -> None:
    """Stop as Ctrl-Z does, with the shell's terminal modes; returns when `fg` resumes the program.

    For programs that read single keys, where the terminal does not turn Ctrl-Z into a signal. Nothing is
    stopped on Windows.
    """
    if sys.platform == "win32":
        return
    import termios

    keys = sys.stdin.fileno()
    now = termios.tcgetattr(keys)
    if _shell_modes is not None:
        termios.tcsetattr(keys, termios.TCSADRAIN, _shell_modes)
    # The whole group: a program that started this one and waits for it must stop as well.
    os.killpg(0, signal.SIGTSTP)
    termios.tcsetattr(keys, termios.TCSADRAIN, now)
