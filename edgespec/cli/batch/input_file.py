"""The input of a batch: JSON Lines, in EdgeSpec's own format or OpenAI's."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from edgespec.cli.batch import openai_format, own_format, score_format
from edgespec.cli.batch.job import Job
from edgespec.cli.utf8 import UTF16, decoded, refuse_folder
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, shortened

_HEAD_BYTES = 64 << 10
MAX_LINE = 256 << 20
"""Bytes of a line: more would fill the memory."""

_SAMPLE_BYTES = 1 << 20
_TOKEN_BYTES = 3.5  # of a usual text in a line
_TEMPLATE_TOKENS = 32
_IMAGE = re.compile(rb'"data:[^"]*"')  # whose bytes say nothing of its tokens
_NAMES_IMAGE = re.compile(rb'"images"\s*:\s*\[\s*"|"type"\s*:\s*"(?:input_)?image(?:_url)?"')
_PRETTY = re.compile(rb'\{[^\S\n]*\n\s*"')


@dataclass(frozen=True)
class Input:
    """An open input."""

    lines: Iterable[bytes]  # a JSON object each, if they are valid
    waits: bool  # reading may wait for somebody to write
    is_empty: bool  # there is nothing in it


@contextmanager
def open_input(name: str) -> Iterator[Input]:
    """Open the input with that name, and look at how it begins; "-" is standard input.

    Raises:
        UsageError: it cannot be read, or holds something else; the lines raise it, too.
    """
    with _opened(name) as file:
        name = "Standard input" if name == "-" else name
        waits = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        with _reading(name):
            head = file.peek(_HEAD_BYTES)
        yield Input(_lines_of(file, head, name), waits, not head)


def is_file(name: str) -> bool:
    """True if an input can be read several times; a file that is called "-" is not meant by that."""
    return name != "-" and Path(name).is_file()


def _opened(name: str) -> io.BufferedReader:
    if name == "-":
        if sys.stdin is None:
            raise UsageError("Standard input is closed.", "Give a file to --input.")
        return io.BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False), _HEAD_BYTES)
    if not name:
        raise UsageError("--input is empty.", "Give a file to --input.")
    with _reading(name):
        refuse_folder(Path(name))
        return io.BufferedReader(io.FileIO(name), _HEAD_BYTES)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", "Give a file to --input.") from error


def _lines_of(file: IO[bytes], head: bytes, name: str) -> Iterator[bytes]:
    """The lines of JSON Lines."""
    begins = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if _PRETTY.match(begins):
        raise UsageError(f"{name} has objects that span several lines.", "Convert it: jq -c .")
    if begins[:1] == b"[" or (
        begins and not any(line.lstrip().startswith(b"{") for line in begins.splitlines())
    ):
        if begins.startswith(UTF16):
            decoded(begins, name)
        raise UsageError(
            f"{name} is not JSON Lines.",
            'Write a line such as {"prompt": "Hello"} for each prompt. '
            "jq -c '.[]' converts JSON arrays, and zcat compressed files.",
        )
    return _lines(file, name)


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    with _reading(name):
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise UsageError(f"A line of {name} has more than {MAX_LINE >> 20} MiB.", "Shorten it.")
            yield line


@dataclass(frozen=True)
class InputSummary:
    """Facts about an input that are known before its lines are parsed."""

    lines: int = 0  # that are not blank; 0 if the input is not a file
    # Of a usual line, estimated from the beginning of the file; None if it is not a file. How many tokens
    # prompts really have is only known with the model.
    prompt_tokens: int | None = None
    has_images: bool = False  # lines name images; False if the input is not a file

    def usual_tokens(self, max_tokens: int) -> int | None:
        """Estimate the tokens of a line's prompt and answer together; None if the input is not a file."""
        return None if self.prompt_tokens is None else self.prompt_tokens + max_tokens


def summarize_input(name: str) -> InputSummary:
    """Read an input once, if it is a file."""
    if not is_file(name):
        return InputSummary()
    count = sampled = sampled_bytes = passed = 0
    has_images = False
    with open_input(name) as source:
        for line in source.lines:
            in_sample = passed < _SAMPLE_BYTES
            passed += len(line)
            if line.isspace():
                continue
            count += 1
            if in_sample:
                sampled += 1
                sampled_bytes += len(_IMAGE.sub(b"", line))
            # Most lines do not have the word, and looking for it is much faster than the expression.
            has_images = has_images or (b"image" in line and _NAMES_IMAGE.search(line) is not None)
    prompt = sampled_bytes / max(sampled, 1) / _TOKEN_BYTES
    return InputSummary(count, round(prompt) + _TEMPLATE_TOKENS, has_images)


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
