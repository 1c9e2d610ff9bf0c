"""The log of requests and answers: a line for every request, for people and for programs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgespec.base.units import readable_rate
from edgespec.files.writing import writing_to
from edgespec.generation.result import Generation, tokens_per_second

GONE = 499
"""The status of a request whose client left before it was answered, as nginx has it."""


@dataclass(frozen=True)
class RequestLogEntry:
    """One request; no text of it, or of its answer, is kept.

    Attributes:
        time: when it came, in ISO 8601.
        status: of HTTP; GONE if the client left.
        seconds: from its arrival to the end of the answer.
        prompt_tokens, completion_tokens: of all its answers together.
        tokens_per_second: tokens after the first passes of all its answers together, per second of decoding.
        tokens_per_pass: on average.
        finish_reason: of the first answer; empty if there is none.
        warnings: what of the request had no effect, in sentences.
    """

    time: str
    path: str
    status: int
    seconds: float
    streamed: bool
    prompt_tokens: int
    completion_tokens: int
    prompt_seconds: float
    tokens_per_second: float
    tokens_per_pass: float
    finish_reason: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        status: int,
        seconds: float,
        answers: Sequence[Generation],
        *,
        streamed: bool,
        warnings: Sequence[str] = (),
    ) -> RequestLogEntry:
        """The entry for a request that has just been answered or refused."""
        first = answers[0] if answers else Generation()
        return cls(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            path=path,
            status=status,
            seconds=round(seconds, 4),
            streamed=streamed,
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum(len(answer.tokens) for answer in answers),
            prompt_seconds=round(first.timings.prefill_s, 4),
            tokens_per_second=round(tokens_per_second(answers), 3),
            tokens_per_pass=round(first.tokens_per_pass, 3),
            finish_reason=first.finish_reason if answers else "",
            warnings=tuple(warnings),
        )

    @property
    def _rate(self) -> str:
        return f"{readable_rate(self.tokens_per_second, '/s')}, " if self.tokens_per_second else ""

    def __str__(self) -> str:
        """The entry for people, in a line."""
        text = f"{self.path} {self.status} in {self.seconds:.2f} s"
        told = "".join(f"\n  {warning}" for warning in self.warnings)
        if not self.finish_reason:
            return text + told
        return (
            f"{text}: {self.prompt_tokens} tokens read in {self.prompt_seconds:.2f} s, "
            f"{self.completion_tokens} written, {self._rate}"
            f"{self.tokens_per_pass:.2f} a pass, {self.finish_reason}{told}"
        )


def request_logger(file: Path | None, show: Callable[[str], None] | None) -> logging.Logger:
    """A logger for entries.

    Args:
        file: where JSON lines are appended; None for nowhere.
        show: called with each entry as a line of text; None for nobody.
    """
    logger = logging.Logger("requests")
    if show is not None:
        logger.addHandler(_Showing(show))
    if file is not None:
        with writing_to(file, "Give another name to --log."):
            logger.addHandler(_JSONLines(file, encoding="utf-8"))
    return logger


class _Showing(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


class _JSONLines(logging.FileHandler):
    """Appends entries; a file that cannot be written any more keeps no request from being answered."""

    def format(self, record: logging.LogRecord) -> str:
        entry: Any = record.msg
        return json.dumps(asdict(entry))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self.setLevel(logging.CRITICAL)  # and so this is said once
        logging.getLogger("uvicorn.error").error("Logging stopped: %s.", sys.exc_info()[1])
