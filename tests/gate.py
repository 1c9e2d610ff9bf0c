"""EdgeSpec as a program that stops in the middle of an answer until a test lets it go on.

    python -m tests.gate FOLDER PLACE ARGUMENTS...

So a test that kills, interrupts or suspends an answer never comes after its end, on any machine.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

PROMPT, PASS, DRAFT = "prompt", "pass", "draft"
"""Places: before a prompt is read, before a pass over drafted trees, before a tree is drafted."""

_AFTER = {PROMPT: 0, PASS: 3, DRAFT: 3}  # so that some of the answer has been shown
_LOOK_S = 0.01


class Gate:
    """The test's end: closes the gate, waits until the program stands before it, and opens it.

    Attributes:
        program: what to run instead of `edgespec`.
    """

    def __init__(self, folder: Path, place: str = PASS) -> None:
        folder.mkdir()
        self.program = (sys.executable, "-m", "tests.gate", str(folder), place)
        self._folder = folder

    def close(self) -> None:
        """Let the next answer come no further than the place."""
        (self._folder / "closed").touch()

    def wait(self) -> None:
        """Return once the program stands before the gate."""
        wait_until((self._folder / "reached").exists)

    def open(self) -> None:
        """Let it go on."""
        (self._folder / "open").touch()


def _install(folder: Path, place: str) -> None:
    """Have the program wait at the place, once, until the gate opens or the answer is cancelled."""
    from edgespec.drafters.model import ModelDrafter
    from edgespec.engine.engine import Engine
    from edgespec.engine.target import Target

    cancelled = threading.Event()
    passed = 0

    def stop() -> None:
        nonlocal passed
        if not (folder / "closed").exists() or (folder / "reached").exists():
            return
        passed += 1
        if passed > _AFTER[place]:
            cancelled.clear()
            (folder / "reached").touch()
            while not (folder / "open").exists() and not cancelled.wait(_LOOK_S):
                pass

    def before(cls: type, name: str, act: Callable[[], object]) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def acting(*arguments: Any, **more: Any) -> Any:
            act()
            return original(*arguments, **more)

        setattr(cls, name, acting)

    before(Engine, "cancel", cancelled.set)
    cls, name = {
        PROMPT: (Target, "prefill"),
        PASS: (Target, "verify"),
        DRAFT: (ModelDrafter, "draft_together"),
    }[place]
    before(cls, name, stop)


if __name__ == "__main__":
    from edgespec.cli.main import main

    _install(Path(sys.argv[1]), sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    raise SystemExit(main())
