"""What people see on standard error: notes, warnings, errors, statistics and progress."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from edgespec.cli.interrupt import Cancellable, cancelling
from edgespec.cli.screen.formatting import format_statistics, in_columns
from edgespec.cli.screen.status import Status, aside
from edgespec.generation.result import Generation
from edgespec.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from edgespec.cli.options.loading import LoadOptions
    from edgespec.engine.engine import Engine
    from edgespec.generation.rules import Rule


class Terminal:
    """Everything besides results: notes, statistics, and what is going on.

    Args:
        quiet: only warnings and errors.
        verbose: statistics and notes even if stderr is no terminal.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self._quiet = quiet

    def note(self, text: str) -> None:
        """Say something that a person may want to know."""
        if not self._quiet:
            _print(text)

    def rows(self, rows: Mapping[str, str]) -> None:
        """Say things with a name each, in two columns."""
        if not self._quiet:
            width = shutil.get_terminal_size().columns if is_terminal(sys.stderr) else None
            for line in in_columns([*rows.items()], width):
                _print(line)

    def detail(self, text: str) -> None:
        """Say something that only `--verbose` wants to know."""
        if self.verbose:
            _print(text, style="dim")

    def warn(self, text: str) -> None:
        """Say something that went wrong while the rest goes on."""
        _print(text, style="yellow")

    def load(self, loading: LoadOptions) -> Engine:
        """Load what was asked for, telling how far it is; raises what `edgespec.load` raises.

        Raises:
            KeyboardInterrupt: Ctrl-C, at the next sign of progress. Raised from the signal handler itself
                it would be lost inside llama.cpp's callbacks, where ctypes swallows exceptions.
        """
        engine = None
        try:
            with self.working() as report:
                engine = loading.load(report)
        except KeyboardInterrupt:
            if engine is not None:
                engine.close()
            raise
        for line in engine.warnings:
            self.warn(line)
        for line in (engine.description, *engine.notes):
            self.detail(line)
        return engine

    @contextlib.contextmanager
    def working(self, engine: Cancellable | None = None) -> Iterator[Progress]:
        """A line that shows what is told to it; Ctrl-C ends the work at the next thing told.

        Args:
            engine: whose pass Ctrl-C ends too.
        """
        with self.status() as status, cancelling(engine or _NothingToCancel()) as interruption:

            def report(what: str, fraction: float) -> None:
                status.progress(what, fraction)
                if interruption:
                    raise KeyboardInterrupt

            try:
                yield report
            except Exception:
                if interruption:  # what was ended in the middle looks like a failure
                    raise KeyboardInterrupt from None
                raise
            if interruption:
                raise KeyboardInterrupt

    def show(self, line: Text) -> None:
        """Print a styled line."""
        with aside():
            _console().print(line, soft_wrap=True)

    def rule(self, rule: Rule) -> None:
        """Say it, if the rule by which drafted tokens are accepted is lossy."""
        if rule.kind.lossy:
            self.warn(f"--verify {rule} is lossy: the text may differ from the model's own.")

    def template(self, engine: Engine, *, raw: bool) -> None:
        """Say it, if a prompt is gone on with as plain text and nobody asked for that."""
        if not raw and not engine.has_chat_template:
            self.note(
                "The model has no chat template, so it goes on with the prompt as plain text. "
                "With --raw this note is left out."
            )

    def statistics(self, generation: Generation) -> None:
        """One line about an answer, for people who watch."""
        if self.verbose or (is_terminal(sys.stderr) and not self._quiet):
            _print(format_statistics(generation), style="dim")

    def status(self) -> Status:
        """A line for what is going on."""
        return Status(shown=is_terminal(sys.stderr) and not self._quiet)


class _NothingToCancel:
    """Loading is stopped by what its progress is told to."""

    def cancel(self) -> None:
        pass


def print_error(what: str, hint: str) -> None:
    """Say what failed, and what to do on a line of its own."""
    from rich.text import Text

    message = Text.assemble(("Error:", "bold red"), " ", what)
    whole = not is_terminal(sys.stderr)
    _console().print(message, soft_wrap=whole)
    if hint:
        _console().print(Text(hint), soft_wrap=whole)


def shows_colour(stream: TextIO | None) -> bool:
    """Whether a person sits there whose terminal can be steered, and who wants that (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return is_terminal(stream) and not plain


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sits at the other end."""
    return stream is not None and not stream.closed and stream.isatty()


def _print(text: str, style: str = "") -> None:
    from rich.text import Text

    # A terminal's lines are broken between words; what is piped on is not broken at all.
    with aside():
        _console().print(Text(text, style=style), soft_wrap=not is_terminal(sys.stderr))


@functools.cache
def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)
