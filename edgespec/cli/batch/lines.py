"""The input lines of a batch: each is JSON, in EdgeSpec's own format or in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.cli.batch import openai_format, own_format, score_format
from edgespec.cli.batch.job import Job
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, shortened

MAX_DEEP = 200  # levels of JSON in a line; Python's own limit is a few times higher


def read_jobs(
    lines: Iterable[bytes],
    defaults: GenerationConfig | None = None,
    *,
    scores: bool = False,
    folder: Path | None = None,
) -> Iterator[Job]:
    """The jobs of an input, one per line; blank lines are skipped.

    Args:
        defaults: settings for what lines leave open.
        scores: the lines' texts are to be scored.
        folder: where the paths of images begin; None leaves images in files alone.
    """
    defaults = defaults or GenerationConfig()
    seen: dict[str | int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        job = _read_job(number, line, defaults, scores, folder)
        if job.identifier in seen:
            first = seen[job.identifier]
            error = job.error or f"Duplicate id {shortened(repr(job.identifier))} (first on line {first})."
            job = replace(job, error=error, duplicate_of=first)
        seen.setdefault(job.identifier, number)
        yield job


def _read_job(number: int, line: bytes, defaults: GenerationConfig, scores: bool, folder: Path | None) -> Job:
    try:
        values = _parse_object(line)
    except UsageError as error:
        return Job(number, number, error=str(error), scored=() if scores else None)
    if scores:
        return score_format.read_request(values, number, defaults)
    if openai_format.recognizes(values):
        return openai_format.read_request(values, number, defaults)
    return own_format.read_request(values, number, defaults, folder)


def _parse_object(line: bytes) -> dict[str, Any]:
    text = decoded(line, "The line").strip()
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"Invalid JSON at column {error.colno}: {error.msg.removesuffix(' starting at')}."
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # Python's limit: parsing digits takes quadratic time
        raise UsageError("A number has too many digits.") from error
    if _depth_exceeds(values, MAX_DEEP):
        raise _too_deep()
    if not isinstance(values, dict):
        raise UsageError("The line is not a JSON object.", 'For example: {"prompt": "..."}')
    return values


def _depth_exceeds(value: object, most: int) -> bool:
    """True if lists and objects are nested deeper; found without recursion, which has its own limit."""
    level: list[object] = [value]
    for _ in range(most + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return False
        level = inner
    return True


def _too_deep() -> UsageError:
    return UsageError(f"The JSON is nested deeper than {MAX_DEEP} levels.")
