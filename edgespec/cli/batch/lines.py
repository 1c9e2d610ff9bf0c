"""The input lines of a batch: the request in each, or why it is invalid."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, Grammar, shortened

MOST_ANSWERS = 1000
MOST_DEEP = 200  # levels of JSON in a line; Python's own limit is a few times higher

Messages = list[dict[str, str]]

_SETTINGS = {n: v for n, v in asdict(GenerationConfig()).items() if n != "grammar"}
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Job:
    """One input line.

    Attributes:
        line: its number, from 1.
        identifier: its "id", or else the line number.
        prompt: None if the line could not be read.
        settings: fields of GenerationConfig that this line overrides.
        answers: its "n"; None if it has none.
        error: why the line is invalid; empty if it is valid.
        duplicate_of: the earlier line with the same id; 0 if there is none.
    """

    line: int
    identifier: str | int
    prompt: str | Messages | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    answers: int | None = None
    duplicate_of: int = 0


def read_jobs(lines: Iterable[bytes]) -> Iterator[Job]:
    """The jobs of an input, one per line; blank lines are skipped."""
    seen: dict[str | int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        job = _read_job(number, line)
        if job.identifier in seen and not job.error:
            first = seen[job.identifier]
            error = f"The id {shortened(repr(job.identifier))} is that of line {first} too."
            job = Job(number, job.identifier, job.prompt, error=error, duplicate_of=first)
        seen.setdefault(job.identifier, number)
        yield job


def _read_job(number: int, line: bytes) -> Job:
    identifier: str | int = number
    prompt: str | Messages | None = None
    try:
        values = _parse_object(line)
        identifier = _identifier(values.pop("id", number))
        prompt = _prompt(values)
        answers = _answers(values.pop("n", None))
        grammar = _grammar(values)
        settings = {name: _setting(name, value) for name, value in values.items()} | grammar
    except UsageError as error:
        return Job(number, identifier, prompt, error=str(error))
    return Job(number, identifier, prompt, settings, answers=answers)


def _parse_object(line: bytes) -> dict[str, Any]:
    text = decoded(line, "It").strip()
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"It is not valid JSON: {error.msg} at column {error.colno}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # Python's limit: parsing digits takes quadratic time
        raise UsageError("It holds a number of too many digits.") from error
    if _depth_exceeds(values, MOST_DEEP):
        raise _too_deep()
    if not isinstance(values, dict):
        raise UsageError("It is not a JSON object.", 'Write {"prompt": "..."}.')
    return values


def _identifier(value: object) -> str | int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise UsageError(f"The id is {_shown(value)}.", "It must be a text or a whole number.")


def _grammar(values: dict[str, Any]) -> dict[str, Grammar]:
    """The grammar that a line requests: "json_schema" (an object) or "grammar" (text)."""
    if "json_schema" in values and "grammar" in values:
        raise UsageError('It has both "json_schema" and "grammar".')
    if (schema := values.pop("json_schema", None)) is not None:
        return {"grammar": Grammar.of_schema(schema)}
    if (text := values.pop("grammar", None)) is not None:
        if not isinstance(text, str):
            raise UsageError("The field 'grammar' is not text.")
        return {"grammar": Grammar("grammar", _unicode(text))}
    return {}


def _answers(value: object) -> int | None:
    if value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_ANSWERS
    ):
        return value
    raise UsageError(f"The field 'n' is {_shown(value)}.", f"It must be from 1 to {MOST_ANSWERS}.")


def _prompt(values: dict[str, Any]) -> str | Messages:
    if ("prompt" in values) == ("messages" in values):
        raise UsageError('It must have either "prompt" or "messages".')
    if "prompt" in values:
        prompt = values.pop("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UsageError("The prompt is not a text, or empty.")
        return _unicode(prompt)
    messages = values.pop("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("The messages are not a list, or empty.")
    return [_message(message) for message in messages]


def _message(message: object) -> dict[str, str]:
    if (
        not isinstance(message, dict)
        or set(message) != {"role", "content"}
        or message["role"] not in _ROLES
        or not isinstance(message["content"], str)
    ):
        raise UsageError(
            "A message is wrong.", f'It must have a "role" ({", ".join(_ROLES)}) and a text as "content".'
        )
    return {"role": message["role"], "content": _unicode(message["content"])}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The text holds half a surrogate pair.") from error
    return text


def _depth_exceeds(value: object, most: int) -> bool:
    """Whether lists and objects are nested deeper; found without recursion, which has its own limit."""
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
    return UsageError(f"It is nested deeper than {MOST_DEEP} levels.")


def _shown(value: object) -> str:
    """A value for a message, as JSON."""
    return shortened(json.dumps(value))


def _setting(name: str, value: Any) -> Any:
    if name not in _SETTINGS:
        close = difflib.get_close_matches(name, _SETTINGS, n=1)
        raise UsageError(
            f"There is no field {shortened(repr(name))}.", f"Did you mean {close[0]!r}?" if close else ""
        )
    default = _SETTINGS[name]
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        fits = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        value = tuple(map(_unicode, texts)) if fits else value
    elif value is None:
        fits = default is None
    elif isinstance(default, str):
        fits = isinstance(value, str)
    else:
        kinds = (int, float) if isinstance(default, float) else int
        fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits:
        raise UsageError(f"The field {name!r} is {_shown(value)}, which is of the wrong kind.")
    return value
