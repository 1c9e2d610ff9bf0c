"""A result that a batch is to write, and the answers that it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgespec.cli.batch import openai_format, own_format, score_format
from edgespec.cli.batch.job import Job
from edgespec.cli.batch.result_file import Key, refused_key
from edgespec.cli.origin import Origin
from edgespec.engine.requests import Request
from edgespec.errors import EdgeSpecError
from edgespec.generation.result import Generation


@dataclass(eq=False)
class PendingResult:
    """A result that is wanted: one answer to a line, or in OpenAI's format all of them."""

    job: Job
    key: Key
    origin: Origin | None  # None if the line is invalid
    place: int  # its number among all results of this run, from 0
    indices: range  # those of its answers among all answers to the line
    several: bool  # whether the line has more than one answer
    requests: list[Request] = field(default_factory=list)  # what the engine was asked so far
    closed: bool = False  # there is nothing more to wait for: it is complete, failed or interrupted
    _answers: dict[int, Generation] = field(default_factory=dict)

    def add(self, index: int, answer: Generation) -> dict[str, Any] | None:
        """Add an answer; returns the result if this was the last one."""
        self._answers[index] = answer
        if len(self._answers) < len(self.indices):
            return None
        self.closed = True
        if self.job.scored is not None:
            answers = [self._answers[i] for i in self.indices]
            return score_format.score_record(self.job, answers, self.origin)
        if self.job.endpoint is None:
            return own_format.answer_record(self.job, answer, self.origin, index=self._index)
        assert self.origin is not None, "only valid lines have answers"
        return openai_format.answer_record(self.job, [self._answers[i] for i in self.indices], self.origin)

    def fail(self, error: EdgeSpecError) -> dict[str, Any]:
        """The result if an answer fails; the others are no longer needed."""
        self._close()
        if self.job.endpoint is not None:
            return openai_format.failure_record(self.job, error, self.origin)
        message = f"line {self.job.line}: {error}"
        if self.job.scored is not None:
            return score_format.failure_record(self.job, message, self.origin)
        return own_format.failure_record(self.job, message, self.origin, index=self._index)

    def interrupt(self, answer: Generation) -> dict[str, Any]:
        """The result if an answer is interrupted."""
        self._close()
        if self.job.scored is not None:
            return score_format.cancelled_record(self.job, self.origin)
        if self.job.endpoint is None:
            return own_format.answer_record(self.job, answer, self.origin, index=self._index)
        return openai_format.cancelled_record(self.job, self.origin)

    @property
    def _index(self) -> int | None:
        return self.indices[0] if self.several and not self.job.duplicate_of else None

    def _close(self) -> None:
        self.closed = True
        for request in self.requests:
            request.cancelled = True


def results_of(job: Job, answers: int) -> Iterable[tuple[Key, range]]:
    """The key of each result of a line, and the indices of the answers in it.

    Args:
        answers: to lines without an "n".
    """
    answers = job.answers or answers
    if job.duplicate_of:
        return [(refused_key(job.identifier, job.line), range(1))]
    if job.error:
        return [((job.identifier, 0), range(1))]
    if job.scored is not None:
        return [((job.identifier, 0), range(max(len(job.scored), 1)))]
    if job.endpoint is not None:
        return [((job.identifier, 0), range(answers))]
    return (((job.identifier, index), range(index, index + 1)) for index in range(answers))
