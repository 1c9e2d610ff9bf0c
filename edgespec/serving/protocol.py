"""The JSON of the OpenAI API: requests to what the engine takes, answers to what clients expect."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.encoding import Prompt
from edgespec.errors import UsageError
from edgespec.generation import MAX_SEED, Generation, GenerationConfig, Grammar

_MOST_ANSWERS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Names of the API, and ours where it has none, for fields of GenerationConfig.
_FIELDS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "penalty_window": "penalty_window",
    "seed": "seed",
    "stop": "stop",
}
_WHOLE = ("max_tokens", "max_completion_tokens", "top_k", "penalty_window", "seed")
_NOT_HERE = {
    "tools": "Tools are",
    "functions": "Functions are",
    "logprobs": "Log-probabilities are",
    "top_logprobs": "Log-probabilities are",
    "logit_bias": "A logit bias is",
    "suffix": "A suffix is",
    "audio": "Audio is",
}


@dataclass(frozen=True)
class Request:
    """What a client asked for.

    Attributes:
        chat: messages to answer; otherwise a text to go on with.
        answers: how many.
        with_usage: a last piece of a stream tells the usage.
    """

    chat: bool
    prompt: Prompt
    config: GenerationConfig
    answers: int
    stream: bool
    with_usage: bool


def read_request(body: object, defaults: GenerationConfig, *, chat: bool, model: str) -> Request:
    """The request in a body.

    Raises:
        UsageError: a field is missing, unknown to be served here, or out of its range.
        UnknownModel: another model is asked for.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    asked = body.get("model")
    if asked not in (None, "", model):
        raise UnknownModel(f"The model {asked!r} does not exist here.", f"This server runs {model!r}.")
    for name, what in _NOT_HERE.items():
        if body.get(name) not in (None, False, 0, [], {}):
            raise UsageError(f"{what} not supported.", f"Leave out {name!r}.")
    answers = body.get("n") or 1
    if not isinstance(answers, int) or not 1 <= answers <= _MOST_ANSWERS:
        raise UsageError(f"n is {answers!r}.", f"It must be from 1 to {_MOST_ANSWERS}.")
    options = body.get("stream_options") or {}
    return Request(
        chat=chat,
        prompt=_messages(body.get("messages")) if chat else _text_prompt(body.get("prompt")),
        config=_config(body, defaults),
        answers=answers,
        stream=bool(body.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


class UnknownModel(UsageError):
    """A model that this server does not run."""


def nth_config(config: GenerationConfig, index: int) -> GenerationConfig:
    """The settings of the answer number `index`: a seed counts up."""
    return config if config.seed is None else config.with_(seed=(config.seed + index) % (MAX_SEED + 1))


class Reply:
    """Builds the bodies that answer one request, all with the same id."""

    def __init__(self, request: Request, model: str) -> None:
        self._chat = request.chat
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            text: dict[str, Any] = (
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
                if self._chat
                else {"text": answer.text}
            )
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": _reason(answer)})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(answers)}

    def first(self, index: int) -> dict[str, Any] | None:
        """What begins a streamed chat answer."""
        return self._piece(index, {"role": "assistant", "content": ""}, None) if self._chat else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A piece of a streamed answer."""
        return self._piece(index, {"content": text} if self._chat else text, None)

    def last(self, index: int, answer: Generation) -> dict[str, Any]:
        """What ends a streamed answer."""
        return self._piece(index, {} if self._chat else "", _reason(answer))

    def usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """The usage, as a piece of its own without choices."""
        return {**self._head, "object": self._piece_kind, "choices": [], "usage": usage(answers)}

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _piece(self, index: int, delta: object, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, ("delta" if self._chat else "text"): delta, "finish_reason": reason}
        return {**self._head, "object": self._piece_kind, "choices": [choice | {"logprobs": None}]}


def usage(answers: Sequence[Generation]) -> dict[str, int]:
    """Tokens read and generated."""
    read, written = answers[0].prompt_tokens if answers else 0, sum(len(a.tokens) for a in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def failure(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models(name: str, started: int) -> dict[str, Any]:
    """The body of the list of models."""
    return {"object": "list", "data": [model(name, started)]}


def model(name: str, started: int) -> dict[str, Any]:
    """The body about one model."""
    return {"id": name, "object": "model", "created": started, "owned_by": "edgespec"}


def _reason(answer: Generation) -> str:
    return "length" if answer.finish_reason == "length" else "stop"


def _config(body: Mapping[str, Any], defaults: GenerationConfig) -> GenerationConfig:
    changes: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = body.get(name)
        if value is None:
            continue
        if name == "stop":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise UsageError("stop is of the wrong kind.", "It must be a text or a list of texts.")
            value = tuple(text for text in texts if text)
        elif isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else (int, float)):
            raise UsageError(f"{name} is {value!r}.", "It must be a number.")
        elif name == "seed":
            value %= MAX_SEED + 1
        changes[field] = value
    grammar = _grammar(body)
    if grammar is not None:
        changes["grammar"] = grammar
    return defaults.with_(**changes)


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    """The form asked for: by `response_format`, or as llama.cpp's server takes it."""
    if isinstance(body.get("grammar"), str):
        return Grammar("grammar", body["grammar"])
    if isinstance(body.get("json_schema"), dict):
        return Grammar("json_schema", json.dumps(body["json_schema"]))
    form = body.get("response_format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
        return Grammar("json_schema", json.dumps(form["json_schema"].get("schema", {})))
    raise UsageError("response_format is of the wrong kind.", "It must be text, json_object or json_schema.")


def _text_prompt(value: object) -> Prompt:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise UsageError("The prompt is not one text or list of tokens, or empty.")


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError("The messages are not a list, or empty.")
    return [_message(message) for message in value]


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise UsageError("A message is wrong.", f"It must have a role: {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise UsageError("A part of a message is no text.", "Only text is understood here.")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise UsageError("A message has no text as its content.")
    return {"role": _ROLES[message["role"]], "content": content}
