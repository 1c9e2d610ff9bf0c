"""EdgeSpec's own batch format: lines with a prompt and settings, and a result for each answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.api.contents import data_address
from edgespec.api.images import data_of, without_data
from edgespec.cli.batch.job import Job
from edgespec.cli.origin import NO_ORIGIN, Origin
from edgespec.errors import UsageError, did_you_mean, similar
from edgespec.files.user_folders import expanded
from edgespec.generation.config import NOT_SETTINGS, GenerationConfig, Grammar, shortened
from edgespec.generation.result import Generation
from edgespec.generation.thinking import think_text
from edgespec.images.parts import hash_of, image_of

MAX_ANSWERS = 1000

Messages = list[dict[str, Any]]

_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_DATA = "data:"

_SETTINGS = {n: v for n, v in asdict(GenerationConfig()).items() if n not in NOT_SETTINGS}
_FIELDS = ("prompt", "messages", "images", "n", "json_schema", "grammar", "logprobs")
_ROLES = ("system", "user", "assistant", "tool")


def read_request(
    values: dict[str, Any], line: int, defaults: GenerationConfig, folder: Path | None = None
) -> Job:
    """The job of a line.

    Args:
        values: the JSON object in it.
        line: its number.
        defaults: settings for what it leaves open.
        folder: where the paths of images begin; None leaves images in files alone.
    """
    identifier: str | int = line
    prompt: str | Messages | None = None
    columns: dict[str, Any] = {}
    try:
        identifier = read_identifier(values, line)
        columns = take_columns(values, (*_SETTINGS, *_FIELDS))
        images = LineImages(folder)
        given = values.pop("images", None)
        prompt = read_prompt(values, images)
        shown: Any = prompt if isinstance(prompt, str) else without_data(prompt)
        before: tuple[str, ...] = ()
        if given is not None:
            if not isinstance(prompt, str) or not isinstance(given, list):
                raise UsageError(
                    '"images" must be a list, beside a "prompt".',
                    "In messages, images are parts of a content.",
                )
            parts = [images.part(source) for source in given]
            before = tuple(
                f"sha256:{part['sha256']}" if "data" in part else part_name
                for part, part_name in zip(parts, given, strict=True)
            )
            prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        answers = _answers(values.pop("n", None))
        grammar = _grammar(values)
        settings = {name: _setting(name, value) for name, value in values.items()} | grammar
        config = defaults.with_(**settings)
        return Job(line, identifier, prompt, config, answers, shown=shown, images=before, columns=columns)
    except UsageError as error:
        return Job(line, identifier, prompt, error=str(error), columns=columns)


def answer_record(
    job: Job, answer: Generation, origin: Origin | None, *, index: int | None = None
) -> dict[str, Any]:
    """The result of an answer.

    Args:
        index: its number among the answers to the line; None if the line has only one.
    """
    record = answer.to_json(job.prompt if job.shown is None else job.shown, job.identifier)
    if job.images:
        record = {"id": record["id"], "prompt": record["prompt"], "images": list(job.images), **record}
    record |= job.kept | (origin.to_json() if origin else NO_ORIGIN)
    return record if index is None else {"id": record["id"], "index": index, **record}


def failure_record(
    job: Job, message: str, origin: Origin | None, *, index: int | None = None
) -> dict[str, Any]:
    """The result of an answer that failed, or of an invalid line."""
    record = answer_record(job, Generation(finish_reason="error"), origin, index=index)
    if job.duplicate_of:
        record |= {"line": job.line, "duplicate_of": job.duplicate_of}
    return record | {"error": message}


def read_identifier(values: dict[str, Any], line: int) -> str | int:
    """Read the "id" of a line, and remove it from its values."""
    value = values.pop("id", None)
    if value is None:
        return line
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise UsageError(f'"id" must be a string or an integer, not {_shown(value)}.')


def take_columns(values: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Remove the fields of a line that have no effect, and those without a value.

    Returns:
        The former.
    """
    columns = {name: values.pop(name) for name in list(values) if name not in known}
    for name in columns:
        if name in NOT_SETTINGS or similar(name, known):
            raise UsageError(
                f"There is no field {shortened(repr(name))}.",
                did_you_mean(name, known, "Lines in OpenAI's format have it."),
            )
    for name in [name for name, value in values.items() if value is None]:
        del values[name]
    return columns


def _grammar(values: dict[str, Any]) -> dict[str, Grammar]:
    """The grammar that a line requests: "json_schema" (an object) or "grammar" (text)."""
    if "json_schema" in values and "grammar" in values:
        raise UsageError('Both "json_schema" and "grammar" are set.', "Leave out one of them.")
    if (schema := values.pop("json_schema", None)) is not None:
        return {"grammar": Grammar.of_schema(schema)}
    if (text := values.pop("grammar", None)) is not None:
        if not isinstance(text, str):
            raise UsageError(f'"grammar" must be a string, not {_shown(text)}.')
        return {"grammar": Grammar("grammar", read_unicode(text))}
    return {}


def _answers(value: object) -> int | None:
    if value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_ANSWERS
    ):
        return value
    raise UsageError(f'"n" must be from 1 to {MAX_ANSWERS}, not {_shown(value)}.')


def read_prompt(values: dict[str, Any], images: LineImages | None = None) -> str | Messages:
    """Read the "prompt" or the "messages" of a line, and remove them from its values.

    Args:
        images: reads those of messages; None if there may be none.
    """
    if ("prompt" in values) == ("messages" in values):
        raise UsageError(
            'Both "prompt" and "messages" are set.'
            if "prompt" in values
            else 'Missing "prompt" or "messages".'
        )
    if "prompt" in values:
        prompt = values.pop("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UsageError('"prompt" must be a non-empty string.')
        return read_unicode(prompt)
    messages = values.pop("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError('"messages" must be a non-empty list.')
    return [_message(message, images) for message in messages]


def _message(message: object, images: LineImages | None) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, dict) else None
    if (
        not isinstance(message, dict)
        or set(message) != {"role", "content"}
        or message["role"] not in _ROLES
        or not isinstance(content, str if images is None else str | list)
    ):
        raise UsageError(
            f'Each message must have a "role" ({", ".join(_ROLES)}) and a string "content", and nothing else.'
        )
    if isinstance(content, list):
        assert images is not None, "or it was refused"
        return {"role": message["role"], "content": [_part(part, images) for part in content]}
    return {"role": message["role"], "content": read_unicode(content or "")}


def _part(part: object, images: LineImages) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": read_unicode(part["text"])}
    if isinstance(part, dict) and kind in ("image", "image_url"):
        return images.of_message(part)
    raise UsageError(
        "A part of a message is neither a text nor an image.",
        'Write {"type": "text", "text": ...} or {"type": "image", "path": ...}.',
    )


def read_unicode(text: str) -> str:
    """Refuse text with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The text contains half of a surrogate pair.") from error
    return text


def _shown(value: object) -> str:
    """A value for a message, as JSON."""
    return shortened(json.dumps(value))


def _setting(name: str, value: Any) -> Any:
    if name in ("max_tokens", "seed") and value == -1:  # no limit, and a random one: as elsewhere
        return None
    if name == "think":
        return think_text(value)
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(map(read_unicode, texts))
    return value


class LineImages:
    """Checks the images that one line names. Those in files are read again when the line is answered.

    Args:
        folder: where relative paths begin; None leaves the files alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._count = 0

    def part(self, source: object) -> dict[str, Any]:
        """The image with that path or data URL, as part of a message, with the hash of its bytes."""
        self._count += 1
        name = f"Image {self._count}"
        if not isinstance(source, str) or not source:
            raise UsageError(f"{name} must be a path or a data URL, not {shortened(json.dumps(source))}.")
        if source[: len(_DATA)].lower() == _DATA:
            data = data_of(source, name)
            return {"type": "image", "data": data, "name": name, "sha256": hash_of(data)}
        if _ADDRESS.match(source):
            raise UsageError(f"{name} is at {shortened(source)}, and images are not fetched.", "Give a file.")
        if self._folder is None:
            return {"type": "image", "path": source}
        path = self._folder / expanded(source)
        return {"type": "image", "path": str(path), "sha256": image_of(path).sha256}

    def of_message(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """An image among the parts of a message: with a "path", or "data" in Base64, or an "image_url".

        Raises:
            UsageError: as `part`; or it has none of them.
        """
        if "data" in part:
            return self.part(data_address(part["data"]))
        url = part.get("image_url")
        return self.part(url.get("url") if isinstance(url, Mapping) else url or part.get("path"))
