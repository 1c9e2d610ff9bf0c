"""Text on standard input together with a prompt: `cat notes | edgespec generate -p TEXT`.

Text from a pipe or a file goes before the prompt, separated by an empty line, as in `llm` and `ollama`. Other
kinds of standard input are not read if there is a prompt: a service or a container may inherit one on which
nothing ever arrives.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys

from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.cli.utf8 import as_text, decoded
from edgespec.errors import UsageError

_PATIENCE_S = 2.0
_MAX_BYTES = 64 << 20


def whole_prompt(prompt: str | None, terminal: Terminal, how: str) -> str:
    """The prompt, after the text that is piped in.

    Args:
        prompt: that of the command line; None reads all of standard input, whatever its kind.
        how: how to give a prompt, for the message if there is none.
    """
    if prompt is not None:
        prompt = as_text(prompt, "The prompt")
        if not prompt:
            raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
        piped = _read(terminal) if _is_pipe_or_file() else ""
        return f"{piped}\n\n{prompt}" if piped.strip() else prompt
    if sys.stdin is None or sys.stdin.closed or is_terminal(sys.stdin):
        raise UsageError("No prompt was given.", how)
    text = _read(terminal)
    if not text:
        raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
    return text


def _is_pipe_or_file() -> bool:
    mode = _mode()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _mode() -> int:
    """The file mode of standard input; 0 if it has none."""
    try:
        return os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return 0  # closed, or replaced by a Python object


def _read(terminal: Terminal) -> str:
    _note_waiting(terminal)
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"Standard input cannot be read: {error.strerror}.", "Give the prompt with -p TEXT."
        ) from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"Standard input has more than {_MAX_BYTES >> 20} MiB.", "Use a part of it.")
    return decoded(data, "The text on standard input").removesuffix("\n").removesuffix("\r")


def _note_waiting(terminal: Terminal) -> None:
    """Note that standard input is awaited: without it, an open pipe looks like a program that hangs."""
    if os.name != "posix" or not stat.S_ISFIFO(_mode()):
        return
    ready, _, _ = select.select([sys.stdin], [], [], _PATIENCE_S)
    if not ready:
        terminal.note("Waiting for text on standard input. If there is none, add: </dev/null")
