"""Requests for embeddings, and `/v1/embeddings` of the OpenAI API."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.api.completion_request import model_name
from edgespec.api.endpoint import Event
from edgespec.api.refusals import Refusal
from edgespec.api.values import integer, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

_MAX_INPUTS = 2048

Input = str | list[int]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for embeddings.

    Attributes:
        inputs: texts, or tokens of the model.
        model: the name by which the model was asked for; empty if it was by none.
        dimensions: elements of an embedding; None leaves all.
        truncate: cut inputs that are too long, instead of refusing them.
        normalize: embeddings have length 1.
        as_base64: embeddings are sent as base64 of their bytes.
        warnings: what of it has no effect.
    """

    inputs: tuple[Input, ...]
    model: str = ""
    dimensions: int | None = None
    truncate: bool = False
    normalize: bool = True
    as_base64: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Embedded:
    """The answer to a request for embeddings.

    Attributes:
        model: the name of the model.
        vectors: (inputs, elements).
        tokens: of all inputs.
        seconds: from the request's arrival to this answer.
    """

    model: str
    vectors: Vectors
    tokens: int
    seconds: float


class EmbeddingEndpoint(ABC):
    """An endpoint that answers requests for embeddings."""

    @abstractmethod
    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        """The request in a body.

        Args:
            names: the model's, the first one its own.
            width: elements of an embedding.

        Raises:
            UsageError: a field is missing, has another type, or is out of its range.
        """

    @abstractmethod
    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        """The body of the answer."""

    def failure(self, refusal: Refusal) -> Event:
        """The body of an error."""
        return refusal.body


class OpenAIEmbeddings(EmbeddingEndpoint):
    """`/v1/embeddings` of the OpenAI API."""

    _FIELDS = ("model", "input", "dimensions", "encoding_format", "user")

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        fields, warnings = object_of(body), Warnings()
        form = fields.get("encoding_format")
        if form not in (None, "float", "base64"):
            raise wrong("encoding_format", form, '"float" or "base64"')
        inputs = inputs_of("input", fields.get("input"))
        if not all(inputs):
            raise UsageError("input must not be empty, nor have an empty text or list of tokens.")
        model = model_name(fields.get("model"), names, warnings)
        dimensions = integer(fields, "dimensions", 1, width)
        warn_of_others(fields, self._FIELDS, warnings)
        return EmbeddingRequest(
            inputs, model, dimensions, as_base64=form == "base64", warnings=warnings.sentences
        )

    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(vector) if request.as_base64 else vector.tolist(),
                }
                for index, vector in enumerate(found.vectors)
            ],
            "model": found.model,
            "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
            **({"warnings": list(request.warnings)} if request.warnings else {}),
        }


def object_of(body: object) -> Mapping[str, Any]:
    """The fields of a body.

    Raises:
        UsageError: it is no object.
    """
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    return body


def inputs_of(name: str, value: object) -> tuple[Input, ...]:
    """The inputs in a field: a text, tokens, or a list of these.

    Raises:
        UsageError: it is something else.
    """
    inputs = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(inputs, list) or not all(isinstance(one, str) or _are_tokens(one) for one in inputs):
        wanted = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise wrong(name, value, wanted)
    if len(inputs) > _MAX_INPUTS:
        raise UsageError(f"{name} has {len(inputs):,} inputs.", f"At most {_MAX_INPUTS:,} are allowed.")
    return tuple(inputs)


def warn_of_others(fields: Mapping[str, Any], known: Collection[str], warnings: Warnings) -> None:
    """Warn of the fields that mean nothing in a request for embeddings."""
    for name, value in fields.items():
        if name not in known and value is not None:
            warnings.add(f"Ignored unknown field {shown(name)}.")


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
