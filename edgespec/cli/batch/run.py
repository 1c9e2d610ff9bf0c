"""JSONL in, JSONL out: many prompts with one loaded model.

Lines are in EdgeSpec's own format or in OpenAI's. Many are answered at once, so they are finished in another
order than that of the input; standard output gets them in the input's order, and so does an output file in
the end. A line that fails gives a result that says why, and the others are still answered. With an output
file, a second run does only what is missing there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from edgespec.api.completion_request import check_tokens, nth_config
from edgespec.api.images import without_data
from edgespec.base.units import readable_rate
from edgespec.cli.batch import openai_format
from edgespec.cli.batch.answering import BatchRequests, answer_all, explained
from edgespec.cli.batch.input_file import (
    Input,
    InputSummary,
    is_file,
    open_input,
    read_jobs,
    summarize_input,
)
from edgespec.cli.batch.job import Job, JobQueue
from edgespec.cli.batch.result_file import EarlierAnswers, Key, PendingResult, ResultFile, results_of
from edgespec.cli.interrupt import ENDING, Interruption, cancelling
from edgespec.cli.origin import ModelIdentity, Origin, model_identity
from edgespec.cli.reloading import with_reloads
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.status import StatusLine, format_seconds
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.engine.requests import Request
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.generation.config import GenerationConfig, shortened
from edgespec.generation.result import Generation

if TYPE_CHECKING:
    from edgespec.cli.batch.cluster import Cluster
    from edgespec.engine.engine import Engine
    from edgespec.text.encoding import Prompt

_MAX_HELD = 1000  # results that wait for an earlier one; no lines are begun beyond that


class ReorderBuffer:
    """Holds results back until all that come before them in the input are there."""

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


class BatchRun:
    """Answers every line of an input, and counts the outcomes.

    Args:
        results: where answers go.
        file: the same, if it is a file that may hold earlier results.
        answers: how many each line gets, unless it has an "n".
        ordered: write results in the order of the input.
        overwrite: answer lines again whose answers in the file were made differently.
        scores: the lines' texts are scored, not answered.
        ray: the address of the cluster whose engines answer; None for an engine here.
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
        ordered: bool = True,
        overwrite: bool = False,
        scores: bool = False,
        ray: str | None = None,
    ) -> None:
        self._config = config
        self._terminal = terminal
        self._results = results
        self._file = file
        self._answers = answers
        self._system = system
        self._raw = raw
        self._parallel: int | None = None
        self._ordered = ordered
        self._scores = scores
        self._ray = ray
        self._earlier = EarlierAnswers(file, terminal, overwrite=overwrite)
        self._told_columns = False
        self._model = ModelIdentity()
        self._answered = self._skipped = self._failed = 0
        self._progress = BatchProgress()
        self._keys: list[Key] = []
        self._places = 0  # given to results so far
        self._last_place = -1  # the highest of the results that are written
        self._reorder_buffer = ReorderBuffer()
        self._wanted_requests: BatchRequests | None = None
        self._interruption = Interruption()

    def run(self, input_name: str, loading: Config) -> None:
        """Answer every line that has no answer yet.

        Args:
            loading: says how many lines are answered at once.

        Raises:
            typer.Exit: with 1 if a line failed, or with the code of the signal that stopped the run.
            UsageError: the input cannot be read, or answers in the file were made differently.
            OutputError: a result cannot be written.
        """
        with ExitStack() as stack:
            source = stack.enter_context(open_input(input_name))
            if self._earlier.exist:
                self._model = model_identity(loading.model)
                if is_file(input_name):  # a pipe can be read only once
                    self._earlier.check(self._wanted(input_name))
            self._terminal.rule(self._config.rule)
            asked = loading.batching.parallel
            self._parallel = asked if isinstance(asked, int) else None
            summary = summarize_input(input_name)
            if self._config.max_tokens is not None:
                loading = loading.with_(text_tokens=summary.usual_tokens(self._config.max_tokens))
            loading = loading.with_(images=summary.has_images)
            if source.is_empty or (summary.prompt_tokens is not None and not summary.lines):
                self._terminal.note("The input has no lines.")
            elif is_file(input_name) and not self._asks(input_name):  # no model is loaded for that
                next(self._requests(JobQueue(self._jobs(source.lines, input_name), waits=False), None))
            elif interruption := with_reloads(
                self._load,
                lambda engine: self._answer_all(engine, source, input_name, summary, loading),
                loading,
                self._terminal,
            ):
                place = f"at line {self._progress.line}. " if self._progress.line else ""
                resumes = " The same command continues there." if self._file is not None else ""
                self._terminal.note(f"Interrupted {place}{self._summary()}{resumes}")
                raise typer.Exit(interruption.exit_code)
        if self._file is not None:
            self._file.tidy(self._keys, ordered=self._ordered)
        if self._failed:
            self._terminal.warn(self._summary())
            raise typer.Exit(1)
        self._terminal.note(self._summary())

    def _asks(self, input_name: str) -> bool:
        """True if any valid line has no answer yet."""
        return any(not self._earlier.has(*wanted) for wanted in self._wanted(input_name))

    def _load(self, loading: Config) -> AbstractContextManager[Engine | Cluster]:
        if self._ray is None:
            return self._terminal.load(loading)
        from edgespec.cli.batch.cluster import open_cluster

        return open_cluster(self._ray, loading, self._terminal)

    def _answer_all(
        self,
        engine: Engine | Cluster,
        source: Input,
        input_name: str,
        summary: InputSummary,
        loading: Config,
    ) -> Interruption:
        """Answer all lines; after a failure, those that have no answer yet."""
        here = cast("Engine", engine)  # a cluster answers like one, but tells nothing of its model
        if self._ray is None:
            self._model = model_identity(loading.model)
            self._terminal.template(here, raw=self._raw)
            self._terminal.thinking(here, self._config)
        requests = self._wanted_requests
        if requests is None:
            self._progress = BatchProgress(summary.lines)
            jobs = JobQueue(self._jobs(source.lines, input_name), waits=source.waits)
            requests = self._wanted_requests = BatchRequests(
                self._requests(jobs, None if self._ray else here.vocabulary_size),
                lambda: jobs.wait(lambda: bool(self._interruption)),
            )
        requests.repeat()
        with cancelling(engine, *ENDING) as interruption, self._terminal.status() as status:
            self._interruption = interruption
            for event in answer_all(requests, here, parallel=self._parallel, interruption=interruption):
                wanted, index = event.request.key
                if self._ray is not None:  # which model answers is known with the first answer
                    self._model = cast("Cluster", engine).model
                    wanted.origin = self._origin(wanted.job)
                if event.error is not None:
                    self._fail(wanted, explained(event.error))
                elif event.chunk is not None and event.chunk.generation is not None:
                    self._finish(wanted, index, event.chunk.generation)
                elif event.chunk is not None:
                    self._progress.tokens += len(event.chunk.tokens)
                self._show_progress(status)
        return interruption

    def _requests(self, jobs: JobQueue, vocabulary_size: int | None) -> Iterator[Request | None]:
        """A request for each answer that is wanted and does not exist; None where there is no line yet."""
        while True:
            job = jobs.take() if self._reorder_buffer.held < _MAX_HELD else None
            if job is None:
                yield None
                continue
            origin = self._origin(job)
            self._progress.begun(job.line)
            self._tell_columns(job)
            for key, indices in results_of(job, self._answers):
                self._keys.append(key)
                if origin is not None and self._earlier.has(job.line, key, origin):
                    self._skipped += 1
                    continue
                several = (job.answers or self._answers) > 1
                wanted = PendingResult(job, key, origin, self._places, indices, several)
                self._places += 1
                self._progress.wanted(job.line)
                try:
                    _check(job, vocabulary_size)
                except UsageError as error:
                    self._fail(wanted, error)
                    continue
                for index in indices:
                    if wanted.closed:
                        break
                    wanted.requests.append(self._request(wanted, index))
                    yield wanted.requests[-1]
            self._progress.asked(job.line)

    def _tell_columns(self, job: Job) -> None:
        """Warn once of fields that have no effect."""
        if job.columns and not self._told_columns:
            self._told_columns = True
            names = ", ".join(shortened(repr(name)) for name in job.columns)
            self._terminal.warn(f'line {job.line}: Fields without effect are kept as "columns": {names}.')

    def _request(self, wanted: PendingResult, index: int) -> Request:
        job = wanted.job
        assert job.prompt is not None, "only invalid lines have no prompt"
        if job.scored is not None:
            text = job.scored[index] if job.scored else None
            return Request(job.prompt, job.config, True, (wanted, index), scored_from=0, continuation=text)
        prompt, raw = self._asked(job)
        return Request(prompt, nth_config(job.config, index), raw, key=(wanted, index))

    def _fail(self, wanted: PendingResult, error: EdgeSpecError) -> None:
        """Record why there is no answer."""
        if wanted.closed:
            return
        self._failed += 1
        self._terminal.warn(f"line {wanted.job.line}: {error}")
        self._progress.done(wanted.job.line)
        self._record(wanted.fail(error), wanted)

    def _finish(self, wanted: PendingResult, index: int, answer: Generation) -> None:
        """Record an answer, or all answers that belong together when this is the last."""
        if wanted.closed:
            return
        if answer.finish_reason == "cancelled":
            record = wanted.interrupt(answer)
            if self._file is None:  # the next run writes the whole answer to the file
                self._record(record, wanted)
        elif (whole := wanted.add(index, answer)) is not None:
            self._answered += 1
            self._progress.done(wanted.job.line)
            self._record(whole, wanted)

    def _wanted(self, input_name: str) -> Iterator[tuple[int, Key, Origin]]:
        """Line, key and origin of every result of an input."""
        with open_input(input_name) as source:
            for job in self._jobs(source.lines, input_name):
                origin = self._origin(job)
                if origin is not None:
                    for key, _ in results_of(job, self._answers):
                        yield job.line, key, origin

    def _jobs(self, lines: Iterable[bytes], input_name: str) -> Iterator[Job]:
        folder = Path.cwd() if input_name == "-" else Path(input_name).absolute().parent
        return read_jobs(lines, self._config, scores=self._scores, folder=folder)

    def _origin(self, job: Job) -> Origin | None:
        """The origin of the line's answers; None if the line is invalid."""
        if job.error or job.prompt is None:
            return None
        if job.scored is not None:
            asked = [job.prompt, *job.scored, job.choices_given]
            return Origin.of(self._model, asked, job.config, raw=False, endpoint="score")
        prompt, raw = self._asked(job)
        if not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
            prompt = without_data(prompt)  # type: ignore[arg-type]
        if job.endpoint is None:
            return Origin.of(self._model, prompt, job.config, raw=raw)
        answers = job.answers or self._answers
        return Origin.of(self._model, prompt, job.config, raw=raw, endpoint=job.endpoint, answers=answers)

    def _asked(self, job: Job) -> tuple[Prompt, bool]:
        """The prompt as the engine is given it, and whether to continue it without a template."""
        assert job.prompt is not None, "only invalid lines have no prompt"
        if job.endpoint == openai_format.TEXT:
            return job.prompt, True
        raw = self._raw and job.endpoint is None
        return with_system(job.prompt, self._system), raw

    def _record(self, record: dict[str, Any], wanted: PendingResult) -> None:
        if self._file is not None:  # at once, so that nothing is lost; `tidy` brings them into order
            self._file.record(record, wanted.key, in_order=wanted.place > self._last_place)
            self._last_place = max(self._last_place, wanted.place)
        elif not self._ordered:
            self._results.record(record)
        else:
            for each in self._reorder_buffer.add(wanted.place, record):
                self._results.record(each)

    def _show_progress(self, status: StatusLine) -> None:
        if status.shown:
            status.say(f"{self._progress.place()}. {self._summary()}")
        elif self._progress.is_time_for_a_note():
            self._terminal.note(f"{self._progress.place()}. {self._summary()}")

    def _summary(self) -> str:
        parts = [f"{self._answered} {'scored' if self._scores else 'answered'}"]
        if self._skipped:
            parts.append(f"{self._skipped} already done")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts) + "."


def _check(job: Job, vocabulary_size: int | None) -> None:
    """Refuse an invalid line, and tokens that the model does not have, if the model is known."""
    if job.error:
        raise UsageError(job.error)
    if vocabulary_size is not None and job.prompt:
        check_tokens(job.prompt, vocabulary_size)


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """The prompt with a system prompt before it, unless it already has one."""
    if system is None:
        return prompt
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *messages]


_NOTE_S = 60.0


class BatchProgress:
    """Progress of a batch, and the time that the rest will take.

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
        """Describe the progress: '12 of 400 lines, 16 in progress, 27 tokens/s, 3:20 left'."""
        seconds = time.monotonic() - self._start
        of = f" of {self._lines}" if self._lines else ""
        text = f"{self._passed}{of} lines, {sum(self._open.values())} in progress"
        if seconds > 0 and self.tokens:
            text += f", {readable_rate(self.tokens / seconds)}"
        if self._lines and self._done:
            text += f", {format_seconds(seconds / self._done * (self._lines - self._passed))} left"
        return text

    def is_time_for_a_note(self) -> bool:
        """True if to print a note in a log: once in a while."""
        if time.monotonic() - self._noted < _NOTE_S:
            return False
        self._noted = time.monotonic()
        return True
