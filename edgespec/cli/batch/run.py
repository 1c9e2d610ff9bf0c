"""JSONL in, JSONL out: many prompts with one loaded model.

Each input line is an object with "prompt" (text) or "messages" (a list), and optionally "id", "n" and any
field of GenerationConfig. Each gives one result, or n, in order. A line that fails gives a result that says
why, and the others are still answered. With an output file, a second run does only what is missing there.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from edgespec.cli.batch.lines import Job, Messages, read_jobs
from edgespec.cli.batch.results import Key, ResultFile, refused_key
from edgespec.cli.batch.resume import EarlierAnswers
from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.options.loading import LoadOptions
from edgespec.cli.origin import NO_ORIGIN, ModelMark, Origin, model_mark
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.status import Status, format_seconds
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import (
    BackendError,
    EdgeSpecError,
    HubError,
    MemoryLimitError,
    ModelFileError,
    OutputError,
    StreamError,
    UsageError,
)
from edgespec.generation.config import MAX_SEED, GenerationConfig
from edgespec.generation.result import Generation

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

_NOTE_S = 60.0
# Failures of the machine, the model or the output, which would affect the next line as well. All others
# concern only one line.
_FATAL = (BackendError, HubError, MemoryLimitError, ModelFileError, OutputError, StreamError)
_FATAL += (OSError, MemoryError)  # type: ignore[assignment]


class BatchRun:
    """Answers every line of an input, and counts the outcomes.

    Args:
        results: where answers go.
        file: the same, if it is a file that may hold earlier results.
        answers: how many each line gets, unless it has an "n".
        overwrite: answer lines again whose answers in the file were made differently.
    """

    def __init__(
        self,
        config: GenerationConfig,
        terminal: Terminal,
        results: ResultStream,
        *,
        file: ResultFile | None,
        answers: int,
        system: str | None,
        raw: bool,
        overwrite: bool = False,
    ) -> None:
        self._config = config
        self._terminal = terminal
        self._results = results
        self._file = file
        self._answers = answers
        self._system = system
        self._raw = raw
        self._earlier = EarlierAnswers(file, terminal, overwrite=overwrite)
        self._model = ModelMark()
        self._answered = self._skipped = self._failed = 0
        self._progress = Progress()

    def run(self, input_name: str, loading: LoadOptions) -> None:
        """Answer every line that has no answer yet.

        Raises:
            typer.Exit: with 1 if a line failed, or with the code of the signal that stopped the run.
            UsageError: the input cannot be read, or answers in the file were made differently.
            OutputError: a result cannot be written.
        """
        keys: list[Key] = []
        with ExitStack() as stack:
            lines = stack.enter_context(_open_input(input_name))
            if self._earlier.exist:
                self._model = model_mark(loading.model)
                if Path(input_name).is_file():  # a pipe can be read only once
                    self._earlier.check(self._wanted(input_name))
            self._terminal.rule(self._config.rule)
            engine = stack.enter_context(self._terminal.load(loading))
            self._terminal.template(engine, raw=self._raw)
            if not self._model.mark:
                self._model = model_mark(loading.model)
            self._progress = Progress(_count_lines(input_name))
            for job in read_jobs(lines):
                begun = False
                origin = self._origin(job)
                for index in range(job.answers or self._answers):
                    keys.append(_key(job, index))
                    if origin is not None and self._earlier.has(job.line, keys[-1], origin):
                        self._skipped += 1
                        continue
                    begun = True
                    interruption = self._do(job, index, engine, origin)
                    if interruption:
                        self._terminal.note(f"Interrupted at line {job.line}. {self._summary()}")
                        raise typer.Exit(interruption.exit_code)
                    if job.error:
                        break
                self._progress.line_done(begun=begun)
        if self._file is not None:
            self._file.tidy(keys)
        if self._failed:
            self._terminal.warn(self._summary())
            raise typer.Exit(1)
        self._terminal.note(self._summary())

    def _do(self, job: Job, index: int, engine: Engine, origin: Origin | None) -> Interruption | None:
        key = _key(job, index)
        several = (job.answers or self._answers) > 1
        made_with = origin.to_json() if origin is not None else NO_ORIGIN
        try:
            if job.error:
                raise UsageError(job.error)
            config = self._config.with_(**job.settings)
            if config.seed is not None:
                config = config.with_(seed=(config.seed + index) % (MAX_SEED + 1))
            with cancelling(engine, signal.SIGTERM) as interruption:
                answer = self._answer(job, config, engine)
        except _FATAL:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, EdgeSpecError) else _bug(error)
            message = f"line {job.line}: {reason}"
            self._failed += 1
            self._terminal.warn(message)
            record = Generation(finish_reason="error").to_json(job.prompt, job.identifier) | made_with
            if job.duplicate_of:
                record |= {"line": job.line, "duplicate_of": job.duplicate_of}
            self._record(record | {"error": message}, key, several)
            return None
        record = answer.to_json(job.prompt, job.identifier) | made_with
        if answer.finish_reason != "cancelled":
            self._answered += 1
            self._record(record, key, several)
        elif self._file is None:  # the next run writes the whole answer to the file
            self._record(record, key, several)
        return interruption

    def _wanted(self, input_name: str) -> Iterator[tuple[int, Key, Origin]]:
        """Line, key and origin of every answer of an input."""
        with _open_input(input_name) as lines:
            for job in read_jobs(lines):
                origin = self._origin(job)
                if origin is not None:
                    for index in range(job.answers or self._answers):
                        yield job.line, _key(job, index), origin

    def _origin(self, job: Job) -> Origin | None:
        """The origin of the line's answers; None if the line is invalid."""
        if job.error or job.prompt is None:
            return None
        try:
            config = self._config.with_(**job.settings)
        except UsageError:
            return None
        return Origin.of(self._model, with_system(job.prompt, self._system), config, raw=self._raw)

    def _record(self, record: dict[str, Any], key: Key, several: bool) -> None:
        if several and key[1] >= 0:
            record = {"id": record["id"], "index": key[1], **record}
        if self._file is not None:
            self._file.record(record, key)
        else:
            self._results.record(record)

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
        place = self._progress.place(job.line)
        status.say(f"{place}: {len(answer.tokens) if answer else 0} tokens. {self._summary()}")
        if not status.shown and self._progress.is_time_for_a_note():
            self._terminal.note(f"{place}. {self._summary()}")

    def _summary(self) -> str:
        parts = [f"{self._answered} answered"]
        if self._skipped:
            parts.append(f"{self._skipped} were there already")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts) + "."


class Progress:
    """How far a batch is, and how long the rest will take.

    Args:
        lines: of the input; 0 if unknown.
    """

    def __init__(self, lines: int = 0) -> None:
        self._lines = lines
        self._passed = self._done = 0
        self._start = self._noted = time.monotonic()

    def line_done(self, *, begun: bool) -> None:
        """Count a line that is finished; `begun` is False if all its answers were there already."""
        self._passed += 1
        self._done += begun

    def place(self, line: int) -> str:
        """Such as 'Line 12 of 400, 3:20 left'."""
        if not self._lines:
            return f"Line {line}"
        text = f"Line {line} of {self._lines}"
        if self._done:
            seconds = time.monotonic() - self._start
            text += f", {format_seconds(seconds / self._done * (self._lines - self._passed))} left"
        return text

    def is_time_for_a_note(self) -> bool:
        """Whether to print a note in a log: once in a while."""
        if time.monotonic() - self._noted < _NOTE_S:
            return False
        self._noted = time.monotonic()
        return True


def _key(job: Job, index: int) -> Key:
    return refused_key(job.identifier, job.line) if job.duplicate_of else (job.identifier, index)


def _bug(error: Exception) -> str:
    return f"This is a bug in EdgeSpec: {type(error).__name__}: {error}"


def with_system(prompt: str | Messages, system: str | None) -> str | Messages:
    """The prompt with a system prompt before it, unless it already has one."""
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


def _count_lines(name: str) -> int:
    """Lines that are not blank; 0 if the input is not a file."""
    if not Path(name).is_file():
        return 0
    with Path(name).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
