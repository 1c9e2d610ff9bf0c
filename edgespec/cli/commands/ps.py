"""`edgespec ps`: the programs of this user that hold a model now."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from edgespec.base.units import readable, readable_time
from edgespec.cli.options.declaration import option
from edgespec.cli.screen.formatting import table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal

_HOLD_A_MODEL = ("chat", "run", "generate", "serve", "bench", "profile")
_SECRET = "--api-key"


def ps(as_json: Annotated[bool, option(None, "--json", "Print JSON.")] = False) -> None:
    """List your running edgespec processes that have a model loaded."""
    found = _running()
    if as_json:
        results().record({"programs": found})
        return
    if not found:
        Terminal().note("No edgespec process has a model loaded.")
        return
    rows = [
        (
            str(program["pid"]),
            readable(program["rss_bytes"]),
            readable_time(program["seconds"]),
            program["command"],
        )
        for program in found
    ]
    results().table(table(("PID", "MEMORY", "FOR", "COMMAND"), rows))


def _running() -> list[dict[str, Any]]:
    import psutil

    found = []
    own = psutil.Process()
    for process in psutil.process_iter():
        try:
            if process.pid == own.pid or process.username() != own.username():
                continue
            words = arguments_of(process.cmdline())
            if words is None:
                continue
            found.append(
                {
                    "pid": process.pid,
                    "command": shlex.join(["edgespec", *_without_secrets(words)]),
                    "rss_bytes": process.memory_info().rss,
                    "seconds": round(time.time() - process.create_time()),
                }
            )
        except psutil.Error:  # it has ended, or may not be looked at
            continue
    return found


def arguments_of(command_line: Sequence[str]) -> list[str] | None:
    """The arguments of edgespec, if that is what runs, with a command that holds a model; None otherwise."""
    by_python = "python" in Path(next(iter(command_line), "")).name
    for at, word in enumerate(command_line[:6]):  # after Python's own options
        if (at == 0 or by_python) and Path(word).name in ("edgespec", "edgespec.exe"):
            rest = list(command_line[at + 1 :])
            return rest if rest and rest[0] in _HOLD_A_MODEL else None
    return None


def _without_secrets(words: Sequence[str]) -> list[str]:
    shown = []
    for at, word in enumerate(words):
        if word.startswith(f"{_SECRET}="):
            shown.append(f"{_SECRET}=...")
        else:
            shown.append("..." if at and words[at - 1] == _SECRET else word)
    return shown
