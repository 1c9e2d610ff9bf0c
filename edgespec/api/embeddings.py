"""Requests for embeddings, and `/v1/embeddings` of the OpenAI API."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edgespec.api.completion_request import Texts, inputs_of, model_name
from edgespec.api.endpoint import Event
from edgespec.api.fields import Fields, read_fields
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings, wrong
from edgespec.errors import UsageError

_MAX_INPUTS = 2048

Input = str | list[int]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for embeddings."""

    inputs: tuple[Input, ...]  # texts, or tokens of the model
    model: str = ""  # the name by which the model was asked for; empty if it was by none
    dimensions: int | None = None  # elements of an embedding; None leaves all
    truncate: bool = False  # cut inputs that are too long, instead of refusing them
    normalize: bool = True  # embeddings have length 1
    as_base64: bool = False  # embeddings are sent as base64 of their bytes
    warnings: tuple[str, ...] = ()  # what of it has no effect

    def __post_init__(self) -> None:
        if len(self.inputs) > _MAX_INPUTS:
            raise UsageError(
                f"There are {len(self.inputs):,} inputs.", f"At most {_MAX_INPUTS:,} are allowed."
            )


@dataclass(frozen=True)
class Embedded:
    """The answer to a request for embeddings."""

    model: str  # the name of the model
    vectors: Vectors  # (inputs, elements)
    tokens: int  # of all inputs
    seconds: float  # from the request's arrival to this answer


class EmbeddingEndpoint(ABC):
    """An endpoint that answers requests for embeddings."""

    @abstractmethod
    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        """The request in a body.

        Args:
            names: the model's, the first one its own.
            width: elements of an embedding.
        """

    @abstractmethod
    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        """The body of the answer."""

    def failure(self, refusal: Refusal) -> Event:
        """The body of an error."""
        return refusal.body


class EmbeddingsBody(Fields):
    """The body of `/v1/embeddings`."""

    without_effect: ClassVar[tuple[str, ...]] = ("user",)

    input: Texts
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class OpenAIEmbeddings(EmbeddingEndpoint):
    """`/v1/embeddings` of the OpenAI API."""

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        warnings = Warnings()
        fields = read_fields(body, EmbeddingsBody, warnings)
        if fields.dimensions is not None and fields.dimensions > width:
            raise wrong("dimensions", fields.dimensions, f"an integer from 1 to {width}")
        return EmbeddingRequest(
            tuple(inputs_of("input", fields.input)),
            model_name(fields.model, names, warnings),
            fields.dimensions,
            as_base64=fields.encoding_format == "base64",
            warnings=warnings.sentences,
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


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
