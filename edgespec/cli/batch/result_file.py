"""The file to which batch results are appended: pending results, resuming from it, and its final order."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.cli.batch import openai_format, own_format, score_format
from edgespec.cli.batch.input_file import MAX_LINE
from edgespec.cli.batch.job import Job
from edgespec.cli.batch.openai_format import CANCELLED
from edgespec.cli.origin import Origin, compact, same
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.terminal import Terminal
from edgespec.engine.requests import Request
from edgespec.errors import EdgeSpecError, OutputError, UsageError
from edgespec.files.writing import atomic_write, only_writer, writing_to
from edgespec.generation.result import Generation

Key = tuple[str | int, int]  # the id of a line and the index of the answer; negative as in `refused_key`
_START = b'{"id": '  # how every result begins


class ResultFile:
    """An output file and the results in it.

    A last line that an earlier run left incomplete is removed. A failed line is tried again by the next
    run; if it then has an answer, or fails differently, `tidy` removes the old result.

    Attributes:
        results: where to write.
        done: finished results, with the compact fingerprint of each; None for results of versions that did
            not record it.
        failed: results that are errors, with their messages.
    """

    def __init__(self, name: str, input_name: str | None = None) -> None:
        self.done: dict[Key, str | None] = {}
        self.failed: dict[Key, str] = {}
        self._path = path = Path(name)
        self._superseded = False  # some results have been replaced by later ones
        self._maybe_unordered = False
        self._is_new = not path.exists()
        if input_name not in (None, "-") and path.exists() and path.samefile(str(input_name)):
            raise OutputError(f"{name} is the input file.", "Give another name to --output.")
        with ExitStack() as stack:
            with writing_to(path, "Give another name to --output."):
                if not path.exists() or path.is_file():  # no terminal, pipe or device
                    stack.enter_context(only_writer(path))
                self._file = stack.enter_context(path.open("a", encoding="utf-8", newline="\n"))
            self.results = ResultStream(self._file, name)
            self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if self._regular:
                self._read_earlier_results()
                # An earlier run may have been killed before it brought its results into order.
                self._maybe_unordered = bool(self.done or self.failed)
            self._open = stack.pop_all()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        with self._open:
            self._file.close()  # Windows removes no open file
            if fault and self._is_new and self._regular and not self._path.stat().st_size:
                self._path.unlink()  # nothing could be answered

    def record(self, record: dict[str, Any], key: Key, *, in_order: bool) -> None:
        """Append a result, unless it repeats an error, or is an error for a line that has an answer.

        Args:
            in_order: whether it follows all results of this run so far in the order of the input.
        """
        error = read_record(record).error
        if key in self.done:
            if error is not None:
                return
            self._superseded = True
        if key in self.failed:
            if self.failed[key] == error:
                return
            self._superseded = True
        if not in_order:
            self._maybe_unordered = True
        self.results.record(record)

    def tidy(self, keys: Iterable[Key], *, ordered: bool) -> None:
        """Keep only the latest result of each key.

        The file is replaced as a whole, and only if necessary.

        Args:
            keys: those of the whole input, in its order.
            ordered: also bring the results into that order; results of other lines come first.

        Raises:
            OutputError: it cannot be written; it is then unchanged.
        """
        known = dict.fromkeys(keys)
        # Errors about duplicate ids whose lines no longer exist.
        outdated = {key for key in self.failed if key[1] < 0 and key not in known}
        if not self._regular or not (self._superseded or outdated or (ordered and self._maybe_unordered)):
            return
        self._file.close()
        # Results without an id have keys of their own: none replaces another.
        places: dict[Key | int, int] = {
            at if result.key is None else result.key: at for at, result in self._earlier_results()
        }
        present = sorted(places, key=lambda key: places[key])
        kept = [key for key in present if key not in outdated]
        if ordered:
            kept = [key for key in kept if key not in known] + [key for key in known if key in places]
        if kept == present and not self._superseded:
            return
        with writing_to(self._path), atomic_write(self._path) as new:
            with self._path.open("rb") as old:  # Windows refuses to replace an open file
                for key in kept:
                    old.seek(places[key])
                    new.write(old.readline())
            Path(new.name).chmod(stat.S_IMODE(self._path.stat().st_mode))

    def made_with(self, wanted: Key) -> Mapping[str, Any]:
        """Return the origin of the latest result with a key of `done`."""
        return [result.made_with for _, result in self._earlier_results() if result.key == wanted][-1]

    def _read_earlier_results(self) -> None:
        for _, result in self._earlier_results():
            key = result.key
            if key is None:
                continue
            if key in self.done or key in self.failed:
                self._superseded = True
            self.failed.pop(key, None)
            self.done.pop(key, None)
            if result.cancelled:
                self._superseded = True
            elif result.error is not None:
                self.failed[key] = result.error
            else:
                self.done[key] = compact(result.made_with.get("fingerprint"))

    def _earlier_results(self) -> Iterator[tuple[int, EarlierResult]]:
        """The results in the file, each with its position; removes an incomplete last line."""
        for at, result in read_results(self._path, "Give another name to --output, or move that file away."):
            if result is None:
                os.truncate(self._path, at)
                return
            yield at, result


class EarlierAnswers:
    """Knows which lines already have an answer that was made with the same model, prompt and settings.

    Args:
        file: the output file; None if answers do not go to a file.
        overwrite: make answers again that were made differently, instead of refusing to continue.
    """

    def __init__(self, file: ResultFile | None, terminal: Terminal, *, overwrite: bool) -> None:
        self._file = file
        self._terminal = terminal
        self._overwrite = overwrite
        self._noted = False

    @property
    def exist(self) -> bool:
        """True if there are any."""
        return self._file is not None and bool(self._file.done)

    def check(self, lines: Iterable[tuple[int, Key, Origin]]) -> None:
        """Check all lines before the model is loaded.

        Args:
            lines: line number, key and origin of each requested answer.

        Raises:
            UsageError: the file holds answers to them that were made differently, and --overwrite was not
                given; says how many, and what differs for the first.
        """
        if self._overwrite:
            return
        first, changed = "", 0
        for line, key, origin in lines:
            if self._differs(key, origin):
                first = first or self._difference(line, key, origin)
                changed += 1
        if changed:
            raise self._made_otherwise(first, changed)

    def has(self, line: int, key: Key, origin: Origin) -> bool:
        """True if the file has the answer."""
        if self._file is None or key not in self._file.done:
            return False
        if not self._differs(key, origin):
            return True
        if not self._overwrite:
            raise self._made_otherwise(self._difference(line, key, origin), 1)
        return False

    def _differs(self, key: Key, origin: Origin) -> bool:
        if self._file is None or key not in self._file.done:
            return False
        was = self._file.done[key]
        if was is None and not self._noted:
            self._noted = True
            self._terminal.note(
                f"Some answers in {self._file.results.name} lack the model, prompt and settings they "
                "were made with; they are kept as they are."
            )
        now = compact(origin.fingerprint)
        return was is not None and now is not None and not same(was, now)

    def _difference(self, line: int, key: Key, origin: Origin) -> str:
        assert self._file is not None
        return f"line {line}: {'; '.join(origin.differences(self._file.made_with(key)))}"

    def _made_otherwise(self, first: str, changed: int) -> UsageError:
        assert self._file is not None
        many = f"{changed} answers" if changed > 1 else "an answer"
        where = f"starting at {first}" if changed > 1 else f"at {first}"
        return UsageError(
            f"{self._file.results.name} has {many} made with different settings, {where}.",
            "Give another name to --output, or --overwrite to answer such lines again.",
        )


@dataclass(frozen=True)
class EarlierResult:
    """A result in an output file."""

    key: Key | None  # None for a result without an id, which belongs to no line
    error: str | None  # why there is no answer; None if there is one
    cancelled: bool  # the answer is incomplete, because the run was interrupted
    # The model, settings and fingerprint that are recorded with it; see `Origin.to_json`
    made_with: Mapping[str, Any]


def refused_key(identifier: str | int, line: int) -> Key:
    """The key of a line that was refused because an earlier line has the same id."""
    return identifier, -line


def read_results(path: Path, hint: str) -> Iterator[tuple[int, EarlierResult | None]]:
    """The results in a file, each with its position in bytes; None for a last line that is incomplete.

    Args:
        hint: what to do if the file holds something else.
    """
    at, number = 0, 0
    with path.open("rb") as lines:
        while line := lines.readline(MAX_LINE + 1):
            number += 1
            is_whole, begins = line.endswith(b"\n"), line[: len(_START)] == _START[: len(line)]
            try:
                if len(line) > MAX_LINE:
                    raise ValueError("too long for a result")
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                if begins and not is_whole and len(line) <= MAX_LINE:
                    yield at, None
                    return
                raise OutputError(f"Line {number} of {path} is not a result.", hint) from error
            try:
                result = read_record(values)
            except (ValueError, OverflowError, TypeError, LookupError) as error:
                raise OutputError(f"Line {number} of {path} is not a result.", hint) from error
            if not is_whole and begins:
                yield at, None
                return
            yield at, result
            at += len(line)


def read_record(record: Any) -> EarlierResult:
    """The result in a JSON object.

    Raises:
        ValueError, LookupError, TypeError, OverflowError: it is something else.
    """
    return _openai_result(record) if "custom_id" in record else _own_result(record)


def _own_result(record: dict[str, Any]) -> EarlierResult:
    identifier, reason = record["id"], record["finish_reason"]
    key: Key | None = (identifier, int(record.get("index", 0)))
    if "duplicate_of" in record:
        key = refused_key(identifier, int(record["line"]))
    hash(key)
    error = str(record.get("error")) if reason == "error" else None
    return EarlierResult(None if identifier is None else key, error, reason == "cancelled", record)


def _openai_result(record: dict[str, Any]) -> EarlierResult:
    identifier, response, failure = record["custom_id"], record["response"], record["error"]
    made_with = record.get("edgespec", {})
    if not isinstance(identifier, str) or not isinstance(made_with, dict):
        raise TypeError("not a result of a batch")
    key: Key = identifier, 0
    if "duplicate_of" in made_with:
        key = refused_key(identifier, int(made_with["line"]))
    if response is not None and response["status_code"] == 200 and failure is None:
        return EarlierResult(key, None, False, made_with)
    # OpenAI puts errors of a request into the body of its response, and vLLM beside the response.
    error = failure if failure is not None else response["body"]["error"]
    details = error if isinstance(error, dict) else {}
    message = details.get("message", error)
    return EarlierResult(key, str(message), details.get("code") == CANCELLED, made_with)


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
