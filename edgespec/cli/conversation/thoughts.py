"""Thoughts before an answer: folded into the status line, or shown dim as they come."""

from __future__ import annotations

import sys
import time

from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.status import StatusLine
from edgespec.cli.screen.terminal import Terminal, shows_colour
from edgespec.generation.result import Chunk
from edgespec.printable import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ThoughtDisplay:
    """Shows thoughts on standard error, so that standard output has nothing but answers.

    Args:
        terminal: where a folded thought leaves a line.
        hint: what that line says about unfolding it.

    Attributes:
        unfolded: whether thoughts are shown as they come.
    """

    def __init__(self, terminal: Terminal, hint: str = "", *, unfolded: bool = False) -> None:
        self.unfolded = unfolded
        self._terminal = terminal
        self._hint = hint
        self._began: float | None = None
        self._tokens = 0
        self._at_line_start = True

    def feed(self, chunk: Chunk, status: StatusLine) -> None:
        """Take a piece of an answer; what it has of a thought is shown."""
        if chunk.reasoning and self._began is None:
            self._began = time.monotonic()
        if self._began is None:
            return
        self._tokens += len(chunk.tokens)
        if not self.unfolded:
            status.say(f"Thinking: {count(self._tokens, 'token')}")
        elif chunk.reasoning:
            status.clear()
            self._write(chunk.reasoning)

    def end(self) -> None:
        """The thought is over, if there was one."""
        if self._began is None:
            return
        seconds, tokens = time.monotonic() - self._began, self._tokens
        self._began, self._tokens = None, 0
        if self.unfolded:
            self._write("\n" if self._at_line_start else "\n\n")
        else:
            self._terminal.hint(f"Thought for {seconds:.1f} s, {count(tokens, 'token')}.{self._hint}")

    def show(self, thought: str) -> None:
        """Show a whole thought."""
        self._write(thought.rstrip("\n") + "\n")

    def _write(self, text: str) -> None:
        text = printable(text)
        self._at_line_start = text.endswith("\n")
        shown = f"{_DIM}{text}{_PLAIN}" if shows_colour(sys.stderr) else text
        sys.stderr.write(shown)  # noqa: TID251 (without line breaks of its own)
        sys.stderr.flush()
