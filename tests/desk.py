"""A program on a real pseudo-terminal: keys go in, and what the screen shows comes out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

import pyte
import pytest

from edgespec.engine.sessions.file import sessions_folder
from tests.waiting import PATIENCE_S

if sys.platform != "win32":
    import fcntl
    import pty
    import termios

STORY = "Write a story of five hundred words about a lighthouse."
_BETWEEN_WORDS = r"(?:\s|\x1b\[[0-?]*[@-~])+"  # spaces, ends of lines, and what steers the terminal

# A new session whose terminal is standard input, so that Ctrl-C reaches the program as at a desk.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


EDGESPEC = (sys.executable, "-m", "edgespec")


class Desk:
    """A terminal with somebody at it, running edgespec, or `program` with it inside."""

    def __init__(
        self, *arguments: str, columns: int = 100, lines: int = 24, program: Sequence[str] = EDGESPEC
    ) -> None:
        if sys.platform == "win32":
            pytest.skip("opens a terminal of POSIX")
        self._ours, theirs = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.program = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""
        self.shown = ""  # since the last `wait_for`
        self.bytes = b""  # everything

    @property
    def echoes(self) -> bool:
        """True if the terminal shows keys as they are typed."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    @property
    def cursor_hidden(self) -> bool:
        """True if the cursor cannot be seen."""
        return bool(self._screen.cursor.hidden)

    @property
    def screen(self) -> list[str]:
        """The lines on the screen, without trailing space; empty ones at the end left out."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def coloured(self) -> list[list[tuple[str, str]]]:
        """The screen as runs of text and their styles, in Rich's words."""
        lines = []
        for y, plain in enumerate(self.screen):
            runs: list[tuple[str, str]] = []
            for x in range(len(plain)):
                cell = self._screen.buffer[y][x]
                words = [cell.fg] if cell.fg != "default" else []
                words += [word for word in ("bold", "italics") if getattr(cell, word)]
                style = " ".join(words).replace("brown", "yellow").replace("italics", "italic")
                if runs and runs[-1][1] == style:
                    runs[-1] = (runs[-1][0] + cell.data, style)
                else:
                    runs.append((cell.data, style))
            lines.append(runs)
        return lines

    def type(self, keys: str) -> None:
        """Press keys."""
        data = keys.encode()
        for at in range(0, len(data), 256):  # neither side must wait for the other for ever
            os.write(self._ours, data[at : at + 256])
            while self._read(0.01 if len(data) > 256 else 0):
                pass

    def press(self, data: bytes) -> None:
        """Send bytes as they are: what a keyboard with another encoding sends."""
        os.write(self._ours, data)

    def resize(self, columns: int, lines: int) -> None:
        """Change the window's size, as dragging its corner does."""
        while self._read(0):  # a real terminal has shown it by then
            pass
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, text: str) -> None:
        """Read what the terminal shows until `text` does, over several lines where the window is narrow."""
        deadline = time.monotonic() + PATIENCE_S
        words = re.compile(_BETWEEN_WORDS.join(map(re.escape, text.split(" "))))
        while (found := words.search(self._seen)) is None:
            if not self._read(deadline - time.monotonic()):
                pytest.fail(f"{text!r} did not come, but {self._seen!r}")
        self.shown, self._seen = self._seen[: found.start()], self._seen[found.end() :]

    def ask(self, text: str, until: str = ">>>") -> None:
        """Type a line when the program is ready for it, and wait for what follows."""
        self.wait_for(">>>")
        self.type(text + "\r")
        self.wait_for(until)

    def leave_by(self, keys: str) -> int:
        """Press keys that end the program when it is ready for them; returns its exit code."""
        self.wait_for(">>>")
        self.type(keys)
        return self.leave()

    def kill(self) -> None:
        """End the program as a power cut would."""
        self.program.send_signal(signal.SIGKILL)
        self.program.wait()

    def leave(self) -> int:
        """The exit code, once the program has ended."""
        while self._read(PATIENCE_S):
            pass
        return self.program.wait(PATIENCE_S)

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self._ours)

    def _read(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._ours], [], [], max(timeout_s, 0))
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
                data = os.read(self._ours, 65536)
        self._stream.feed(data)
        self.bytes += data
        self._seen += data.decode(errors="replace")
        return data


def session_messages(name: str) -> list[str]:
    """The texts of a saved conversation, questions and answers in turn."""
    record = json.loads((sessions_folder() / f"{name}.json").read_text())
    return [message["content"] for message in record["messages"]]
