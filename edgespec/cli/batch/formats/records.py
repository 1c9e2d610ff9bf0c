"""Reads results back from an output file, whether they are in EdgeSpec's own format or in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.cli.batch.formats.openai_format import CANCELLED
from edgespec.cli.batch.input.input_file import MAX_LINE
from edgespec.errors import OutputError

Key = tuple[str | int, int]  # the id of a line and the index of the answer; negative as in `refused_key`

_START = b'{"id": '  # how every result begins


@dataclass(frozen=True)
class EarlierResult:
    """A result in an output file.

    Attributes:
        key: None for a result without an id, which belongs to no line.
        error: why there is no answer; None if there is one.
        cancelled: the answer is incomplete, because the run was interrupted.
        made_with: the model, settings and fingerprint that are recorded with it; see `Origin.to_json`.
    """

    key: Key | None
    error: str | None
    cancelled: bool
    made_with: Mapping[str, Any]


def refused_key(identifier: str | int, line: int) -> Key:
    """The key of a line that was refused because an earlier line has the same id."""
    return identifier, -line


def read_results(path: Path, hint: str) -> Iterator[tuple[int, EarlierResult | None]]:
    """The results in a file, each with its position in bytes; None for a last line that is incomplete.

    Args:
        hint: what to do if the file holds something else.

    Raises:
        OutputError: it does.
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
