"""OpenAI's batch format: each line is a request to its API, and each result the response to one.

`vllm run-batch` reads the same requests. Their bodies mean what they mean to `edgespec serve`, and the bodies
of responses are what it replies. All answers to a request (its "n") are in one response.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from edgespec.api import completion_request, protocol
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.refusals import refusal_for
from edgespec.api.warnings import Warnings
from edgespec.cli.batch.job import Job
from edgespec.cli.origin import NO_ORIGIN, Origin
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.generation.config import GenerationConfig, shortened
from edgespec.generation.result import Generation

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
_FIELDS = ("custom_id", "method", "url", "body")
CANCELLED = "batch_cancelled"
"""The code of the error that stands for an answer that was interrupted."""


def recognizes(values: dict[str, Any]) -> bool:
    """True if the JSON object of a line is a request to the API."""
    return "custom_id" in values and "body" in values


def read_request(values: dict[str, Any], line: int, defaults: GenerationConfig) -> Job:
    """The job of a line; see `own_format.read_request`.

    Without a valid "custom_id", its failure can only be reported in EdgeSpec's own format.
    """
    identifier, endpoint = values["custom_id"], values.get("url")
    columns = {name: value for name, value in values.items() if name not in _FIELDS}
    if not isinstance(identifier, str):
        return Job(
            line, line, error=f'"custom_id" must be a string, not {shortened(json.dumps(identifier))}.'
        )
    try:
        if values.get("method") != "POST":
            method = shortened(json.dumps(values.get("method")))
            raise UsageError(f'"method" must be "POST", not {method}.')
        if endpoint not in (CHAT, TEXT):
            raise UsageError(f'"url" must be {CHAT} or {TEXT}, not {shortened(json.dumps(endpoint))}.')
        body = values["body"]
        if isinstance(body, dict):
            # The file may have been written for a model of another name; the one that is loaded answers.
            # Clients that begin an answer want it back from where it was begun, which takes a server.
            body = {"continue_final_message": False} | body | {"model": None}
        request = completion_request.read_request(
            completion_request.translated(body, chat=endpoint == CHAT, strict=True),
            defaults,
            model="",
            images=RequestImages(Limits(), Warnings(), lambda: True),
        )
        if len(request.prompts) > 1:
            raise UsageError("A line of a batch has one prompt.", "Write a line for each prompt.")
        if request.suffix:
            raise UsageError("A batch cannot fill in texts.", "Leave out 'suffix'.")
        if request.echo:
            raise UsageError("A batch cannot echo prompts.", "Leave out 'echo'; --score scores texts.")
        if request.stream:
            raise UsageError("A batch cannot stream its answers.", "Leave out 'stream'.")
        if request.continues:
            raise UsageError("A batch cannot continue answers.", "Leave out 'continue_final_message'.")
    except (UsageError, UnicodeEncodeError) as error:
        told = str(error) if isinstance(error, UsageError) else "The text contains half of a surrogate pair."
        return Job(line, identifier, endpoint=str(endpoint), error=told, columns=columns)
    answers = None if body.get("n") is None else request.answers
    warnings = tuple(request.warnings)
    config = request.config
    if config.logprobs is None:
        config = config.with_(logprobs=defaults.logprobs)
    return Job(
        line,
        identifier,
        request.prompt,
        config,
        answers,
        endpoint,
        warnings=warnings,
        columns=columns,
    )


def answer_record(job: Job, answers: Sequence[Generation], origin: Origin) -> dict[str, Any]:
    """The response with all answers to a line."""
    model = PurePath(origin.model.name).stem
    reply = protocol.CompletionBuilder(
        chat=job.endpoint == CHAT, model=model, key=_hash(job, origin), warnings=job.warnings
    )
    return _record(job, origin, status=200, body=reply.whole(answers))


def failure_record(job: Job, error: EdgeSpecError, origin: Origin | None) -> dict[str, Any]:
    """The result of a line that failed."""
    refusal = refusal_for(error)
    return _record(job, origin, status=refusal.status, body=refusal.body)


def cancelled_record(job: Job, origin: Origin | None) -> dict[str, Any]:
    """The result of a line that was interrupted."""
    message = "Interrupted before this request was answered."
    failed = {"response": None, "error": {"code": CANCELLED, "message": message}}
    return _record(job, origin, status=0, body={}) | failed


def _record(job: Job, origin: Origin | None, *, status: int, body: dict[str, Any]) -> dict[str, Any]:
    key = _hash(job, origin)
    made_with = job.kept | (origin.to_json() if origin else NO_ORIGIN)
    if job.duplicate_of:
        made_with |= {"line": job.line, "duplicate_of": job.duplicate_of}
    return {
        "id": f"batch_req_{key}",
        "custom_id": job.identifier,
        "response": {"status_code": status, "request_id": key, "body": body},
        "error": None,
        "edgespec": made_with,
    }


def _hash(job: Job, origin: Origin | None) -> str:
    """Return a hash for ids; fixed by the request and the model, so that a repeated run has the same ids."""
    parts = [job.identifier, job.line if job.duplicate_of else 0, origin and origin.fingerprint]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
