"""Requests for embeddings and rankings: `/v1/embeddings` of the OpenAI API, and `/v1/rerank`."""

from __future__ import annotations

import base64
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edgespec.api.completion_request import Texts, inputs_of, model_name
from edgespec.api.endpoint import Event
from edgespec.api.fields import Fields, read_fields
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings, wrong
from edgespec.engine.embedder import relevance
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.engine.embedder import Embedder

_MAX_INPUTS = 2048

Input = str | list[int]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingRequest:
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

    def sequences(self, embedder: Embedder) -> list[list[int]]:
        """The tokens of its inputs; raises as `Embedder.embed`."""
        return [embedder.tokens(one, truncate=self.truncate) for one in self.inputs]


@dataclass(frozen=True)
class RankingRequest(EmbeddingRequest):
    """A request to rank texts, its inputs behind the first, which is the query."""

    most: int | None = None  # how many are wanted, the best first; None for all
    with_texts: bool = False  # the answer repeats them

    @property
    def documents(self) -> list[str]:
        return [str(text) for text in self.inputs[1:]]

    def sequences(self, embedder: Embedder) -> list[list[int]]:
        return embedder.ranked_tokens(str(self.inputs[0]), self.documents)


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
        return refusal.body


class EmbeddingsBody(Fields):
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


class RankedDocument(Struct):
    """A document in a field of its own, as some clients send it."""

    text: str


class RerankBody(Fields):
    """The body of `/v1/rerank`, with the names of Jina, Cohere, vLLM and llama.cpp's server."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Sequence[str | RankedDocument] = ()
    texts: Sequence[str] = ()
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False


class Rerank(EmbeddingEndpoint):
    """`/v1/rerank`: documents by how well they fit a query."""

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        warnings = Warnings()
        fields = read_fields(body, RerankBody, warnings)
        documents = [one if isinstance(one, str) else one.text for one in (*fields.documents, *fields.texts)]
        if not documents or not all(documents):
            raise UsageError("documents must be a non-empty list of non-empty strings.")
        return RankingRequest(
            (fields.query, *documents),
            model_name(fields.model, names, warnings),
            normalize=False,
            warnings=warnings.sentences,
            most=fields.top_n,
            with_texts=fields.return_documents or fields.return_text,
        )

    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        assert isinstance(request, RankingRequest)
        scores = relevance(found.vectors, len(request.documents))

        def ranked(index: int) -> dict[str, Any]:
            result = {"index": index, "relevance_score": float(scores[index])}
            return result | ({"document": {"text": request.documents[index]}} if request.with_texts else {})

        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": found.model,
            "results": [ranked(int(index)) for index in np.argsort(-scores, kind="stable")[: request.most]],
            "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
            **({"warnings": list(request.warnings)} if request.warnings else {}),
        }


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
