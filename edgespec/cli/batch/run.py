"""JSONL in, JSONL out: many prompts with one loaded model.

Each input line is an object with "prompt" (text) or "messages" (a list), and optionally "id", "n" and any
field of GenerationConfig. Each gives one result, or n. Many are answered at once, so they are finished in
another order than that of the input; standard output gets them in the input's order, and so does an output
file in the end. A line that fails gives a result that says why, and the others are still answered. With an
output file, a second run does only what is missing there.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from edgespec.cli.batch.job_queue import JobQueue
from edgespec.cli.batch.lines import Job, Messages, read_jobs
from edgespec.cli.batch.results import Key, ResultFile, refused_key
from edgespec.cli.batch.resume import EarlierAnswers
from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.options.loading import LoadOptions
from edgespec.cli.origin import NO_ORIGIN, ModelMark, Origin, model_mark
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.status import Status, format_seconds
from edgespec.cli.screen.terminal import Terminal
from edgespec.engine.requests import Request, RequestSource
from edgespec.errors import (
    BackendError,
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
_MOST_HELD = 1000  # results that wait for an earlier one; no lines are begun beyond that
# Failures of the machine, the model or the output, which would affect the next line as well. All others
# concern only one line.
_FATAL = (BackendError, HubError, MemoryLimitError, ModelFileError, OutputError, StreamError)
_FATAL += (OSError, MemoryError)  # type: ignore[assignment]


@dataclass(frozen=True)
class _Wanted:
    """An answer that is wanted.

    Attributes:
        place: its number among all answers of this run, from 0.
        several: whether its line asks for more than one.
    """

    job: Job
    key: Key
    origin: Origin | None
    place: int
    several: bool


class BatchRun:
    """Answers every line of an input, and counts the outcomes.

    Args:
        results: where answers go.
        file: the same, if it is a file that may hold earlier results.
        answers: how many each line gets, unless it has an "n".
        parallel: most answers at once; None for as many as one pass can serve.
        ordered: write results in the order of the input.
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
        parallel: int | None = None,
        ordered: bool = True,
        overwrite: bool = False,
    ) -> None:
        self._config = config
        self._terminal = terminal
        self._results = results
        self._file = file
        self._answers = answers
        self._system = system
        self._raw = raw
        self._parallel = parallel
        self._ordered = ordered
        self._earlier = EarlierAnswers(file, terminal, overwrite=overwrite)
        self._model = ModelMark()
        self._answered = self._skipped = self._failed = 0
        self._progress = Progress()
        self._keys: list[Key] = []
        self._places = 0  # given to answers so far
        self._last_place = -1  # of the results so far, the highest
        self._in_order = InOrder()

    def run(self, input_name: str, loading: LoadOptions) -> None:
        """Answer every line that has no answer yet.

        Raises:
            typer.Exit: with 1 if a line failed, or with the code of the signal that stopped the run.
            UsageError: the input cannot be read, or answers in the file were made differently.
            OutputError: a result cannot be written.
        """
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
            jobs = JobQueue(read_jobs(lines), waits=not _is_file(lines))
            interruption = self._answer_all(jobs, engine)
            if interruption:
                place = f"at line {self._progress.line}. " if self._progress.line else ""
                self._terminal.note(f"Interrupted {place}{self._summary()}")
                raise typer.Exit(interruption.exit_code)
        if self._file is not None and self._ordered:
            self._file.tidy(self._keys)
        if self._failed:
            self._terminal.warn(self._summary())
            raise typer.Exit(1)
        self._terminal.note(self._summary())

    def _answer_all(self, jobs: JobQueue, engine: Engine) -> Interruption:
        with cancelling(engine, signal.SIGTERM) as interruption, self._terminal.status() as status:
            source = _Requests(self._requests(jobs), lambda: jobs.wait(lambda: bool(interruption)))
            for event in engine.stream_many(source, parallel=self._parallel):
                wanted: _Wanted = event.request.key
                if event.error is not None:
                    if isinstance(event.error, _FATAL):
                        raise event.error
                    self._fail(wanted, str(event.error))
                elif event.chunk is not None and event.chunk.generation is not None:
                    self._finish(wanted, event.chunk.generation)
                elif event.chunk is not None:
                    self._progress.tokens += len(event.chunk.tokens)
                self._show_progress(status)
        return interruption

    def _requests(self, jobs: JobQueue) -> Iterator[Request | None]:
        """A request for each answer that is wanted and does not exist; None where there is no line yet."""
        while True:
            job = jobs.take() if self._in_order.held < _MOST_HELD else None
            if job is None:
                yield None
                continue
            origin = self._origin(job)
            several = (job.answers or self._answers) > 1
            self._progress.begun(job.line)
            for index in range(job.answers or self._answers):
                key = _key(job, index)
                self._keys.append(key)
                if origin is not None and self._earlier.has(job.line, key, origin):
                    self._skipped += 1
                    continue
                wanted = _Wanted(job, key, origin, self._places, several)
                self._places += 1
                self._progress.wanted(job.line)
                try:
                    if job.error:
                        raise UsageError(job.error)
                    request = self._request(wanted, index)
                except UsageError as error:
                    self._fail(wanted, str(error))
                else:
                    yield request
                if job.error:
                    break
            self._progress.asked(job.line)

    def _request(self, wanted: _Wanted, index: int) -> Request:
        job = wanted.job
        config = self._config.with_(**job.settings)
        if config.seed is not None:
            config = config.with_(seed=(config.seed + index) % (MAX_SEED + 1))
        assert job.prompt is not None
        return Request(with_system(job.prompt, self._system), config, self._raw, key=wanted)

    def _fail(self, wanted: _Wanted, reason: str) -> None:
        """Record why there is no answer."""
        job = wanted.job
        message = f"line {job.line}: {reason}"
        self._failed += 1
        self._terminal.warn(message)
        record = Generation(finish_reason="error").to_json(job.prompt, job.identifier) | _made_with(wanted)
        if job.duplicate_of:
            record |= {"line": job.line, "duplicate_of": job.duplicate_of}
        self._record(record | {"error": message}, wanted)

    def _finish(self, wanted: _Wanted, answer: Generation) -> None:
        """Record an answer."""
        record = answer.to_json(wanted.job.prompt, wanted.job.identifier) | _made_with(wanted)
        if answer.finish_reason != "cancelled":
            self._answered += 1
            self._record(record, wanted)
        elif self._file is None:  # the next run writes the whole answer to the file
            self._record(record, wanted)

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

    def _record(self, record: dict[str, Any], wanted: _Wanted) -> None:
        if record["finish_reason"] != "cancelled":
            self._progress.done(wanted.job.line)
        if wanted.several and wanted.key[1] >= 0:
            record = {"id": record["id"], "index": wanted.key[1], **record}
        if self._file is not None:  # at once, so that nothing is lost; `tidy` brings them into order
            self._file.record(record, wanted.key, in_order=wanted.place > self._last_place)
            self._last_place = max(self._last_place, wanted.place)
        elif not self._ordered:
            self._results.record(record)
        else:
            for each in self._in_order.add(wanted.place, record):
                self._results.record(each)

    def _show_progress(self, status: Status) -> None:
        if status.shown:
            status.say(f"{self._progress.place()}. {self._summary()}")
        elif self._progress.is_time_for_a_note():
            self._terminal.note(f"{self._progress.place()}. {self._summary()}")

    def _summary(self) -> str:
        parts = [f"{self._answered} answered"]
        if self._skipped:
            parts.append(f"{self._skipped} were there already")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts) + "."


class InOrder:
    """Holds results back until all that come before them are there."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, dict[str, Any]] = {}

    @property
    def held(self) -> int:
        """Results that are held back."""
        return len(self._held)

    def add(self, place: int, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a result; yields those that have their turn now."""
        self._held[place] = record
        while self._next in self._held:
            yield self._held.pop(self._next)
            self._next += 1


class Progress:
    """How far a batch is, and how long the rest will take.

    Args:
        lines: of the input; 0 if unknown.

    Attributes:
        tokens: generated so far.
    """

    def __init__(self, lines: int = 0) -> None:
        self.tokens = 0
        self._lines = lines
        self._passed = self._done = 0
        self._open: dict[int, int] = {}  # line -> answers that are not finished
        self._asked: set[int] = set()  # lines of `_open` of which no more answers will be asked for
        self._start = self._noted = time.monotonic()

    @property
    def line(self) -> int:
        """The first line that has begun and is not finished; 0 if there is none."""
        return min((line for line, answers in self._open.items() if answers), default=0)

    def begun(self, line: int) -> None:
        """Note that a line was read."""
        self._open[line] = 0

    def wanted(self, line: int) -> None:
        """Note that another answer to a line is wanted."""
        self._open[line] += 1

    def asked(self, line: int) -> None:
        """Note that all answers to a line have been asked for."""
        self._asked.add(line)
        self._close_if_finished(line, had_answers=False)

    def done(self, line: int) -> None:
        """Note that an answer to a line is finished."""
        self._open[line] -= 1
        self._close_if_finished(line, had_answers=True)

    def _close_if_finished(self, line: int, *, had_answers: bool) -> None:
        if line in self._asked and not self._open[line]:
            del self._open[line]
            self._asked.remove(line)
            self._passed += 1
            self._done += had_answers

    def place(self) -> str:
        """Such as '12 of 400 lines, 16 in progress, 27 tokens/s, 3:20 left'."""
        seconds = time.monotonic() - self._start
        of = f" of {self._lines}" if self._lines else ""
        text = f"{self._passed}{of} lines, {sum(self._open.values())} in progress"
        if seconds > 0 and self.tokens:
            text += f", {self.tokens / seconds:.1f} tokens/s"
        if self._lines and self._done:
            text += f", {format_seconds(seconds / self._done * (self._lines - self._passed))} left"
        return text

    def is_time_for_a_note(self) -> bool:
        """Whether to print a note in a log: once in a while."""
        if time.monotonic() - self._noted < _NOTE_S:
            return False
        self._noted = time.monotonic()
        return True


class _Requests(RequestSource):
    """The requests of a batch; nothing is read ahead of what can be answered."""

    def __init__(self, requests: Iterator[Request | None], wait: Callable[[], bool]) -> None:
        self._requests = requests
        self._wait = wait

    def take(self) -> Request | None:
        return next(self._requests)

    def wait(self) -> bool:
        return self._wait()


def _made_with(wanted: _Wanted) -> dict[str, Any]:
    return wanted.origin.to_json() if wanted.origin is not None else NO_ORIGIN


def _key(job: Job, index: int) -> Key:
    return refused_key(job.identifier, job.line) if job.duplicate_of else (job.identifier, index)


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


def _is_file(lines: IO[bytes]) -> bool:
    """Whether reading never waits for somebody to write."""
    return stat.S_ISREG(os.fstat(lines.fileno()).st_mode)


def _count_lines(name: str) -> int:
    """Lines that are not blank; 0 if the input is not a file."""
    if not Path(name).is_file():
        return 0
    with Path(name).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
