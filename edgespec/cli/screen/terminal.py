"""Output on standard error for people: notes, warnings, errors, statistics and progress."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO, TypeVar

from edgespec.base.progress import Progress, told_of_waiting
from edgespec.cli.interrupt import Cancellable, cancelling
from edgespec.cli.screen.formatting import count, details, format_statistics, in_columns, is_cut_off
from edgespec.cli.screen.status import RemainingTime, StatusLine
from edgespec.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from edgespec.config import Config
    from edgespec.engine.embedder import Embedder
    from edgespec.engine.engine import Engine
    from edgespec.generation.config import GenerationConfig
    from edgespec.generation.result import Generation
    from edgespec.generation.rules import Rule

_LONG_WAIT_S = 5.0


Loaded = TypeVar("Loaded", bound="Engine | Embedder")


class Terminal:
    """Prints everything but results: notes, statistics and progress.

    Args:
        quiet: only warnings and errors.
        verbose: details and statistics too, even if stderr is not a terminal.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self._quiet = quiet

    def note(self, text: str) -> None:
        """Print something that a person may want to know."""
        if not self._quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """Print the reply to a command that a person typed."""
        _print(text)

    @property
    def is_watched(self) -> bool:
        """True if a person sees what goes to standard error, and did not ask for quiet."""
        return is_terminal(sys.stderr) and not self._quiet

    def hint(self, text: str) -> None:
        """Print something in passing, if a person is watching."""
        if self.is_watched:
            _print(text, style="dim")

    def rows(self, rows: Mapping[str, str]) -> None:
        """Print names and texts in two columns."""
        width = shutil.get_terminal_size().columns if is_terminal(sys.stderr) else None
        for line in in_columns([*rows.items()], width):
            self.say(line)

    def detail(self, text: str) -> None:
        """Print something only with `--verbose`."""
        if self.verbose:
            _print(text, style="dim")

    def warn(self, text: str) -> None:
        _print(text, style="yellow")

    def load(self, loading: Config) -> Engine:
        """Load the models and show the progress; raises what `edgespec.load` raises.

        Raises:
            KeyboardInterrupt: on Ctrl-C, at the next report of progress. Raised by the signal handler, it
                would be lost inside llama.cpp's callbacks, where ctypes swallows exceptions.
        """
        from edgespec import open_engine

        engine = self._opened(open_engine, loading)
        self.watch_prompt_cache(engine)
        return engine

    def load_embedder(self, loading: Config) -> Embedder:
        """Load an embedding model and show the progress."""
        from edgespec import open_embedder

        return self._opened(open_embedder, loading)

    def _opened(self, open_model: Callable[[Config, Progress], Loaded], loading: Config) -> Loaded:
        """Open a model, show the progress, and say what there is to say."""
        loaded = None
        try:
            with self.working() as report:
                loaded = open_model(loading, report)
        except KeyboardInterrupt:
            if loaded is not None:
                loaded.close()
            raise
        self.tell_of(loaded)
        return loaded

    def tell_of(self, loaded: Engine | Embedder) -> None:
        """Say what there is to say of a loaded model."""
        for line in loaded.warnings:
            self.warn(line)
        for line in (loaded.description, *loaded.notes):
            self.detail(line)

    def watch_prompt_cache(self, engine: Engine) -> None:
        """Say when the prompt cache on disk fails, and when it works again."""

        def tell(failure: str) -> None:
            if failure:
                self.warn(f"{failure}. Prompts are not cached until that is possible again.")
            else:
                self.note("Prompts are cached on disk again.")

        if engine.prompt_files is not None:
            engine.prompt_files.on_change = tell

    @contextlib.contextmanager
    def working(self, engine: Cancellable | None = None, *, long: bool = False) -> Iterator[Progress]:
        """A status line for some work, as a progress callback; Ctrl-C ends the work at its next report.

        While the work waits for a child process, Ctrl-C ends it at once, and a long wait is reported.

        Args:
            engine: Ctrl-C ends its pass too.
            long: whether the work may take minutes; then how long it will still take is said too, and in a
                pipe, where there is no status line, every now and then by a line of its own.
        """
        remaining = RemainingTime()
        told = False
        with self.status() as status, cancelling(engine or _NothingToCancel()) as interruption:

            def report(what: str, fraction: float) -> None:
                left = remaining.left(fraction) if long else ""
                status.progress(what, fraction, left)
                if long and not status.shown and remaining.is_due():
                    self.note(f"{what} {fraction:.0%}{left}")
                if interruption:
                    raise KeyboardInterrupt

            def wait(what: str, seconds: float) -> None:
                nonlocal told
                if interruption:
                    raise KeyboardInterrupt
                if seconds < _LONG_WAIT_S:
                    return
                status.progress(f"{what} ({seconds:.0f} s)", 0.0)
                if not status.shown and not told:
                    told = True
                    self.note(what)

            try:
                with told_of_waiting(wait):
                    yield report
            except Exception:
                if interruption:  # interrupted work looks like a failure
                    raise KeyboardInterrupt from None
                raise
            if interruption:
                raise KeyboardInterrupt

    def show(self, line: Text) -> None:
        """Print a styled line."""
        _console().print(line, soft_wrap=True)

    def rule(self, rule: Rule) -> None:
        """Warn if the verification rule is lossy."""
        if rule.kind.lossy:
            self.warn(f"--verify {rule} is lossy: the text may differ from the model's own.")

    def template(self, engine: Engine, *, raw: bool) -> None:
        """Note if a prompt is continued as plain text without --raw."""
        if not raw and not engine.has_chat_template:
            self.note(
                "The model has no chat template, so it continues the prompt as plain text. "
                "--raw hides this note."
            )

    def thinking(self, engine: Engine, config: GenerationConfig) -> None:
        """Note if --think has no effect on this model."""
        if config.think != "auto" and not engine.can_think:
            self.note("The model's chat template has no thinking mode, so --think has no effect.")

    def statistics(self, generation: Generation, continue_hint: str) -> None:
        """Print one line about an answer, if a person is watching, and how to continue if it was cut off."""
        if self.verbose or self.is_watched:
            _print(format_statistics(generation), style="dim")
            if is_cut_off(generation):
                _print(f"The answer was cut off by --max-tokens. {continue_hint}", style="dim")

    def only_thought(self, generation: Generation) -> None:
        """Warn if there is no answer behind a thought."""
        if generation.is_only_thought:
            tokens = count(generation.reasoning_tokens, "token")
            self.warn(
                f"The model thought for {tokens} and gave no answer. --think off skips the thought, and "
                "--think N ends it after N tokens; in a chat, /think does the same."
            )

    def all_statistics(self, generation: Generation) -> None:
        """Print every figure of an answer, with `--verbose`."""
        if self.verbose:
            self.rows(details(generation))

    def status(self) -> StatusLine:
        return StatusLine(_console() if self.is_watched else None)


class _NothingToCancel:
    """Work that is stopped by its progress callback alone."""

    def cancel(self) -> None:
        pass


def print_error(what: str, hint: str) -> None:
    """Print what failed and, on a separate line, what to do."""
    from rich.text import Text

    message = Text.assemble(("Error:", "bold red"), " ", what)
    whole = not is_terminal(sys.stderr)
    _console().print(message, soft_wrap=whole)
    if hint:
        _console().print(Text(hint), soft_wrap=whole)


def shows_colour(stream: TextIO | None) -> bool:
    """True if this is a terminal that shows colours, and colours are wanted (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return is_terminal(stream) and not plain


def is_terminal(stream: TextIO | None) -> bool:
    """True if this is an open terminal."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    # Windows takes its null device for one, which Python opens as a file, unlike a console.
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return not (sys.platform == "win32" and isinstance(raw, io.FileIO))


def _print(text: str, style: str = "") -> None:
    from rich.text import Text

    # Lines are wrapped between words on a terminal, and not at all in a pipe.
    _console().print(Text(text, style=style), soft_wrap=not is_terminal(sys.stderr))


@functools.cache
def _console() -> Console:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """Prints control characters of its own alone, and none that a text brings along."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    # COLUMNS and LINES do not follow a window that is resized.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return SafeConsole(stderr=True, highlight=False, _environ=environment)
