"""JSONL in, JSONL out: many prompts with one loaded model.

Each input line is an object with "prompt" (a text) or "messages" (a list), and if wanted "id" and any field
of GenerationConfig. Each gives one result, in order. A line that cannot be done gives a result that
says why, and the rest goes on. With an output file, a second run does only what is missing there.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import typer

from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.jobs import Job, Messages, read_jobs
from edgespec.cli.options import LoadOptions
from edgespec.cli.terminal import ResultStream, Status, Terminal
from edgespec.errors import ContextLengthError, OutputError, TemplateError, UsageError
from edgespec.generation import Generation, GenerationConfig

if TYPE_CHECKING:
    from edgespec.engine import Engine

_START = b'{"id": '  # how every result begins
# What one line can be guilty of; any other failure would meet the next line as well.
_ONE_LINES_FAULT = (UsageError, ContextLengthError, TemplateError)


class BatchRun:
    """Answers every line of an input, and counts how it went."""

    def __init__(
        self,
        config: GenerationConfig,
        terminal: Terminal,
        results: ResultStream,
        *,
        system: str | None,
        raw: bool,
    ) -> None:
        self._config = config
        self._terminal = terminal
        self._results = results
        self._system = system
        self._raw = raw
        self._answered = self._skipped = self._failed = 0

    def run(self, input_name: str, loading: LoadOptions, done: Set[str | int]) -> None:
        """Answer every line whose id is not in `done`.

        Raises:
            typer.Exit: with 1 if a line failed, or with the code of the signal that stopped the run.
            UsageError: the input cannot be read.
            OutputError: a result cannot be written.
        """
        with ExitStack() as stack:
            lines = stack.enter_context(_open_input(input_name))
            self._terminal.rule(self._config.rule)
            engine = stack.enter_context(self._terminal.load(loading))
            for job in read_jobs(lines):
                if job.identifier in done and not job.error:
                    self._skipped += 1
                    continue
                interruption = self._do(job, engine)
                if interruption:
                    self._terminal.note(f"Interrupted at line {job.line}. {self._summary()}")
                    raise typer.Exit(interruption.exit_code)
        if self._failed:
            self._terminal.warn(self._summary())
            raise typer.Exit(1)
        self._terminal.note(self._summary())

    def _do(self, job: Job, engine: Engine) -> Interruption | None:
        try:
            if job.error:
                raise UsageError(job.error)
            config = self._config.with_(**job.settings)
            with cancelling(engine, signal.SIGTERM) as interruption:
                answer = self._answer(job, config, engine)
        except _ONE_LINES_FAULT as error:
            message = f"line {job.line}: {error}"
            self._failed += 1
            self._terminal.warn(message)
            self._results.failure(job.prompt, job.identifier, message)
            return None
        self._results.record(answer.to_json(job.prompt, job.identifier))
        if answer.finish_reason != "cancelled":
            self._answered += 1
        return interruption

    def _answer(self, job: Job, config: GenerationConfig, engine: Engine) -> Generation:
        assert job.prompt is not None
        prompt = with_system(job.prompt, self._system)
        with self._terminal.status() as status:
            answer = None
            for chunk in engine.stream(prompt, config, raw=self._raw, on_prefill=status.prefill):
                self._show_progress(status, job, engine)
                answer = chunk.generation
        assert answer is not None, "the last chunk carries the answer"
        return answer

    def _show_progress(self, status: Status, job: Job, engine: Engine) -> None:
        answer = engine.last_generation
        status.say(f"Line {job.line}: {len(answer.tokens) if answer else 0} tokens. {self._summary()}")

    def _summary(self) -> str:
        parts = [f"{self._answered} answered"]
        if self._skipped:
            parts.append(f"{self._skipped} were there already")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts) + "."


class ResultFile:
    """An output file that results are appended to, and the ids that have their result in it.

    A last line that an earlier run left half-written is cut off.

    Attributes:
        results: where to write.
        done: ids that need no second answer.

    Raises:
        OutputError: the file cannot be written, or holds something else than results.
    """

    def __init__(self, name: str, input_name: str | None = None) -> None:
        self.done: set[str | int] = set()
        path = Path(name)
        if input_name not in (None, "-") and path.exists() and path.samefile(str(input_name)):
            raise OutputError(f"{name} is the input file.", "Give another name to --output.")
        try:
            self._file = path.open("a", encoding="utf-8", newline="\n")
        except FileNotFoundError as error:
            raise OutputError(
                f"{name} cannot be written: there is no folder {path.parent}.", "Make the folder first."
            ) from error
        except OSError as error:
            raise OutputError(
                f"{name} cannot be written: {error.strerror}.", "Give another name to --output."
            ) from error
        self.results = ResultStream(self._file, name)
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._read_earlier_results(path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_earlier_results(self, path: Path) -> None:
        whole = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and line[: len(_START)] == _START[: len(line)]:
                    self._file.truncate(whole)
                    return
                whole += len(line)
                try:
                    record = json.loads(line)
                    identifier, reason = record["id"], record["finish_reason"]
                except (ValueError, RecursionError, TypeError, LookupError) as error:
                    raise OutputError(
                        f"{path} holds something else than results, on line {number}.",
                        "Give another name to --output, or move that file away.",
                    ) from error
                if identifier is not None and reason not in ("cancelled", "error"):
                    self.done.add(identifier)


def with_system(prompt: str | Messages, system: str | None) -> str | Messages:
    """The prompt with a system prompt before it, unless it has one of its own."""
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _open_input(name: str) -> IO[bytes]:
    if name == "-":
        if sys.stdin is None:
            raise UsageError("Standard input is closed.", "Give a file to --input.")
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", "Give a file to --input.") from error
