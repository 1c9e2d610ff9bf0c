"""Results on standard output or in a file: never styled or wrapped, and written at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
from typing import Any, TextIO

from edgespec.cli.screen.formatting import fitted
from edgespec.errors import EdgeSpecError, OutputError
from edgespec.files.writing import unwritable
from edgespec.printable import printable, printable_json


class ResultStream:
    """Writes results to stdout or a file at once, and reports failures by the destination's name.

    Args:
        stream: where they go; None if it is closed.
        name: the destination, for messages.

    Attributes:
        name: the same.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        if stream is None:
            raise OutputError(f"{name} is closed.", "Leave it open, or use --output FILE.")
        self._stream = stream
        self.name = name
        self._plain = stream.isatty()
        self._at_line_start = True

    def text(self, text: str) -> None:
        """Write text for people, without control characters."""
        if text:
            self._write(printable(text))
            self._at_line_start = text.endswith("\n")

    def verbatim(self, text: str) -> None:
        """Write a piece of an answer or a saved text, without control characters on a terminal."""
        if self._plain:
            self.text(text)
        elif text:
            self._write(text)
            self._at_line_start = text.endswith("\n")

    def table(self, text: str) -> None:
        """Write a table for people; on a terminal, its lines end at the window's."""
        if self._plain:
            columns = shutil.get_terminal_size().columns
            text = "".join(f"{fitted(line, columns)}\n" for line in text.splitlines())
        self.text(text)

    def raw(self, text: str) -> None:
        """Write control sequences; `text` must not come from a model, and must end a line."""
        self._write(text)

    def end_line(self) -> None:
        """End the line if it is not empty."""
        if not self._at_line_start:
            self.text("\n")

    def record(self, record: dict[str, Any]) -> None:
        """Write a JSON object as one line."""
        line = json.dumps(record, ensure_ascii=False)
        try:
            line.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:
            line = json.dumps(record)
        self._write(printable_json(line) + "\n")

    def failure(self, prompt: object, identifier: str | int | None, error: str) -> None:
        """Write the JSON object of a prompt without an answer."""
        from edgespec.cli.origin import NO_ORIGIN
        from edgespec.generation.result import Generation

        empty = Generation(finish_reason="error").to_json(prompt, identifier)
        self.record(empty | NO_ORIGIN | {"error": error})

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            unread = isinstance(error, OSError) and error.errno == errno.EINVAL and _is_pipe(self._stream)
            _discard_buffer(self._stream)
            if unread:
                raise BrokenPipeError from error  # Windows does not tell it from a wrong argument
            if isinstance(error, OSError):
                raise unwritable(self.name, error) from error
            raise OutputError(f"{self.name} cannot be written: {error}.", "") from error


class WrittenText:
    """The text of an answer as it is written; if the answer is given once more, only what is new.

    Args:
        results: where it goes.
    """

    def __init__(self, results: ResultStream) -> None:
        self._results = results
        self._written = self._given = ""

    def begin(self) -> None:
        """Begin an answer, or begin one again that failed before its end."""
        self._given = ""

    def add(self, text: str) -> None:
        """Write a piece of the answer."""
        self._given += text
        if not (self._given.startswith(self._written) or self._written.startswith(self._given)):
            raise _differs()
        self._results.verbatim(self._given[len(self._written) :])
        self._written = max(self._written, self._given, key=len)

    def end(self) -> None:
        """End the answer and its line."""
        if len(self._given) < len(self._written):
            raise _differs()
        self._results.end_line()
        self._written = ""


def _differs() -> EdgeSpecError:
    return EdgeSpecError(
        "The answer cannot be continued: the reloaded model's text differs from the text so far.",
        "Run the command again.",
    )


def results() -> ResultStream:
    """Standard output."""
    return ResultStream(sys.stdout, "Standard output")


def _is_pipe(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


def _discard_buffer(stream: TextIO) -> None:
    """Discard the buffer after a failed write, so that it does not fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
