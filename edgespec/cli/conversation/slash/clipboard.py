"""Copies text to the clipboard, by the system's program or through the terminal."""

from __future__ import annotations

import base64
import os
import subprocess
import sys

from edgespec.cli.screen.results import ResultStream
from edgespec.errors import OutputError
from edgespec.processes.children import run

_MAX_BYTES = 74_994  # what xterm accepts in one sequence


def copy(text: str, terminal: ResultStream) -> str:
    """Copy the text; returns how.

    Raises:
        OutputError: there is no such program, and the text is too long for the terminal.
    """
    for command in _commands():
        try:
            run(command, input=text.encode("utf-8", "replace"), check=True, timeout=5)
        except (OSError, subprocess.SubprocessError):
            continue
        return f"with {command[0]}"
    data = base64.b64encode(text.encode("utf-8", "replace"))
    if len(data) > _MAX_BYTES:
        raise OutputError(
            "The text is too long for the terminal's clipboard.", "Install xclip or wl-clipboard."
        )
    # OSC 52: the user's terminal copies it, even from a remote machine.
    terminal.raw(f"\x1b]52;c;{data.decode()}\x07")
    return "through the terminal, if it allows that"


def _commands() -> list[list[str]]:
    if sys.platform == "darwin":
        return [["pbcopy"]]
    if sys.platform == "win32":
        return [["clip"]]
    commands = []
    if os.environ.get("WAYLAND_DISPLAY"):
        commands.append(["wl-copy"])
    if os.environ.get("DISPLAY"):
        commands += [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    return commands
