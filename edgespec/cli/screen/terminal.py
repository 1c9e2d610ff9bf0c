"""What people and scripts see: results on stdout, everything else on stderr.

Results for scripts are never styled or wrapped; a chat at a terminal shows them by markdown.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from edgespec.cli.interrupt import Cancellable, cancelling
from edgespec.cli.origin import NO_ORIGIN
from edgespec.cli.screen.status import Status, aside
from edgespec.errors import OutputError
from edgespec.generation.result import Generation
from edgespec.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from edgespec.cli.options import LoadOptions
    from edgespec.engine.engine import Engine
    from edgespec.generation.rules import Rule

# A model's text must not move the cursor, change colours or write the clipboard of a terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ResultStream:
    """Results on their way to stdout or a file: each write arrives at once, and failures are named.

    Args:
        stream: where they go; None if that is closed.
        name: what the destination is called in messages.

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
        """Write a piece of an answer."""
        if text:
            self._write(printable(text) if self._plain else text)
            self._at_line_start = text.endswith("\n")

    def raw(self, text: str) -> None:
        """Write what steers the terminal; `text` must have been made here, and end a line."""
        self._write(text)

    def end_line(self) -> None:
        """End the line if something stands on it."""
        if not self._at_line_start:
            self.text("\n")

    def record(self, record: dict[str, Any]) -> None:
        """Write a JSON object as one line."""
        line = json.dumps(record, ensure_ascii=False)
        try:
            line.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:
            line = json.dumps(record)
        self._write(line + "\n")

    def failure(self, prompt: object, identifier: str | int | None, error: str) -> None:
        """Write the JSON object of a prompt that got no answer."""
        empty = Generation(finish_reason="error").to_json(prompt, identifier)
        self.record(empty | NO_ORIGIN | {"error": error})

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            _discard_buffer(self._stream)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise OutputError(f"{self.name} cannot be written: {reason}.", "") from error


def printable(text: str) -> str:
    """A model's text without what would steer a terminal."""
    return _CONTROLS.sub("\ufffd", text)


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


def format_gigabytes(n_bytes: float) -> str:
    """Such as 1.84 GB, of 10^9 bytes, as disks are sold."""
    return f"{n_bytes / 1e9:.2f} GB"


def format_statistics(generation: Generation) -> str:
    """The figures of an answer in one line."""
    count = len(generation.tokens)
    return ", ".join(
        [
            f"{count} token{'' if count == 1 else 's'}",
            f"{generation.tokens_per_second:.1f} tokens/s",
            f"{generation.tokens_per_pass:.2f} tokens per pass",
            f"bound by {generation.bound_by}",
            *([f"{generation.gain:.1f}x plain decoding"] if generation.gain else []),
            _mode(generation),
        ]
    )


def details(generation: Generation) -> dict[str, str]:
    """The figures of an answer, by name."""
    timings, memory = generation.timings, generation.memory
    if not generation.passes:
        return {
            "prompt": f"{generation.prompt_tokens} tokens, {timings.prefill_s:.2f} s spent on reading them",
            "answer": f"none; {generation.finish_reason} before it began",
            "mode": _mode(generation),
        }
    return {
        "prompt": f"{generation.prompt_tokens} tokens, read in {timings.prefill_s:.2f} s",
        "answer": f"{len(generation.tokens)} tokens in {timings.decode_s:.2f} s, "
        f"{generation.tokens_per_second:.1f} tokens/s, ended by {generation.finish_reason}",
        "passes": f"{len(generation.passes)}, {generation.tokens_per_pass:.2f} tokens and "
        f"{generation.nodes_per_pass:.1f} nodes each, {generation.acceptance_rate:.0%} of drafts accepted",
        "time": f"{timings.draft_s:.2f} s drafting, {timings.verify_s:.2f} s verifying, "
        f"{timings.io_wait_s:.2f} s of it waiting for the disk",
        "gain": f"{generation.gain:.2f}x plain decoding, by a pass of {1e3 * generation.plain_pass_s:.1f} ms"
        if generation.gain
        else "not known: no plain pass was measured beside trees",
        "memory": f"{memory.peak_rss_bytes / 2**30:.2f} GiB at most of {memory.budget_bytes / 2**30:.2f} GiB",
        "mode": _mode(generation) + (f", seed {generation.seed}" if generation.seed else ""),
    }


def results() -> ResultStream:
    """Standard output."""
    return ResultStream(sys.stdout, "Standard output")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, for results; nothing is cut, so that a path can be copied."""
    lines = [tuple(headings), *map(tuple, rows)] if headings else [tuple(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "".join(f"{line}\n" for line in text)


def in_columns(rows: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Lines with a name and a text each; a text is broken between words to the right of the names.

    Args:
        width: of the window; None breaks nothing, so that it can be piped on.
    """
    import textwrap

    margin = max((len(name) for name, _ in rows), default=0) + 2
    if width is None:
        return [f"{name:<{margin}}{text}".rstrip() for name, text in rows]
    lines: list[str] = []
    for name, text in rows:
        lines += textwrap.wrap(
            text,
            max(width - 1, margin + 12),
            initial_indent=f"{name:<{margin}}",
            subsequent_indent=" " * margin,
            break_long_words=False,  # paths are copied
            break_on_hyphens=False,
        ) or [name]
    return lines


def _mode(generation: Generation) -> str:
    if generation.lossy:
        return f"lossy ({generation.verify})"
    return "exact" if generation.exact else "not bit-exact"


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


def _discard_buffer(stream: TextIO) -> None:
    """What a full disk refused stays in the buffer; let it go nowhere, not fail again when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
