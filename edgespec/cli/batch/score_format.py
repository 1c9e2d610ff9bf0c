"""The format of texts to be scored: a line with a text, or a prompt and what may follow it.

A line has "prompt" (plain text) or "messages" (put into the chat template), and at most one of "completion"
(a text) and "choices" (a list of texts). Without either, the prompt itself is scored. "logprobs" asks for the
values of each token, with so many of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.cli.batch import own_format
from edgespec.cli.batch.job import Job
from edgespec.cli.origin import NO_ORIGIN, Origin
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.generation.score import Score

_FIELDS = ("prompt", "messages", "completion", "choices", "logprobs")


def read_request(values: dict[str, Any], line: int, defaults: GenerationConfig) -> Job:
    """The job of a line; see `own_format.read_request`."""
    identifier: str | int = line
    columns: dict[str, Any] = {}
    try:
        identifier = own_format.read_identifier(values, line)
        columns = own_format.take_columns(values, _FIELDS)
        prompt = own_format.read_prompt(values)
        choices_given = values.get("choices") is not None
        scored = _continuations(values)
        if not scored and not isinstance(prompt, str):
            raise UsageError('"messages" need a "completion" or "choices" to score.')
        config = defaults
        if (logprobs := values.pop("logprobs", None)) is not None:
            config = config.with_(logprobs=logprobs)
        return Job(
            line, identifier, prompt, config, scored=scored, choices_given=choices_given, columns=columns
        )
    except UsageError as error:
        return Job(line, identifier, error=str(error), scored=(), columns=columns)


def score_record(job: Job, answers: Sequence[Generation], origin: Origin | None) -> dict[str, Any]:
    """The result of a line.

    Args:
        answers: one for each of its continuations, or for the prompt.
    """
    record = {"id": job.identifier, "prompt": job.prompt}
    per_token = job.config.logprobs is not None
    scores = [Score.of_prompt(answer).to_json(per_token=per_token) for answer in answers]
    if job.choices_given:
        choices = [{"text": text} | score for text, score in zip(job.scored or (), scores, strict=True)]
        best = max(range(len(choices)), key=lambda index: scores[index]["logprob"])
        record |= {"choices": choices, "best": best}
    else:
        record |= {"completion": job.scored[0] if job.scored else None} | scores[0]
    cancelled = any(answer.finish_reason == "cancelled" for answer in answers)
    record |= {"finish_reason": "cancelled" if cancelled else "stop"}
    record |= {"prompt_tokens": max(answer.prompt_tokens for answer in answers)}
    return record | _made_with(job, origin)


def failure_record(job: Job, message: str, origin: Origin | None) -> dict[str, Any]:
    """The result of a line that could not be scored."""
    record = {"id": job.identifier, "prompt": job.prompt, "finish_reason": "error"} | _made_with(job, origin)
    if job.duplicate_of:
        record |= {"line": job.line, "duplicate_of": job.duplicate_of}
    return record | {"error": message}


def cancelled_record(job: Job, origin: Origin | None) -> dict[str, Any]:
    """The result of a line that was interrupted."""
    record = {"id": job.identifier, "prompt": job.prompt, "finish_reason": "cancelled"}
    return record | _made_with(job, origin)


def _made_with(job: Job, origin: Origin | None) -> dict[str, Any]:
    return job.kept | (origin.to_json() if origin else NO_ORIGIN)


def _continuations(values: dict[str, Any]) -> tuple[str, ...]:
    completion, choices = values.pop("completion", None), values.get("choices")
    if completion is not None and choices is not None:
        raise UsageError('Both "completion" and "choices" are set.', "Leave out one of them.")
    if completion is not None:
        return (_text("completion", completion),)
    values.pop("choices", None)
    if choices is None:
        return ()
    if not isinstance(choices, list) or not 1 <= len(choices) <= own_format.MAX_ANSWERS:
        raise UsageError(f'"choices" must be a list of 1 to {own_format.MAX_ANSWERS} texts.')
    return tuple(_text("choices", text) for text in choices)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f'"{name}" must be text, and not empty.')
    return own_format.read_unicode(value)
