"""Exceptions at any line: what a signal, a callback or a full memory may do to a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import edgespec

_PACKAGE = str(Path(edgespec.__file__).parent)
# llama.cpp calls this code back in the middle of a pass, where no Python signal handler runs; see
# edgespec/llama/runtime/signals.py.
_NEVER = tuple(
    str(Path(_PACKAGE) / part)
    for part in (
        *("offload", "heads/shared/layer_tap.py", "llama/first_layers.py"),
        *("llama/runtime/graph.py", "llama/runtime/signals.py"),
    )
)


class Intrusion(BaseException):
    """Comes from nowhere, as KeyboardInterrupt does."""


class Intruder:
    """Raises `Intrusion` before a line of the package runs.

    Args:
        at: which line to raise at, counted from 1 as lines run in this thread; 0 only counts them.

    Attributes:
        lines: how many have run.
        where: the line it happened at.
    """

    def __init__(self, at: int = 0) -> None:
        self.lines = 0
        self.where = ""
        self._at = at

    def run(self, work: Callable[[], object]) -> bool:
        """Do some work; whether it was interrupted."""
        sys.settrace(self._entered)
        try:
            work()
        except Intrusion:
            return True
        finally:
            sys.settrace(None)
        return False

    def _entered(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(_PACKAGE) and not name.startswith(_NEVER) else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise Intrusion
        return self._line
