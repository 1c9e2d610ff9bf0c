"""`/api/embed`, and the older `/api/embeddings`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, ClassVar

from msgspec import Meta

from edgespec.api.completion_request import model_name
from edgespec.api.embeddings import Embedded, EmbeddingEndpoint, EmbeddingRequest
from edgespec.api.endpoint import Event
from edgespec.api.fields import Fields, read_fields
from edgespec.api.refusals import Refusal
from edgespec.api.warnings import Warnings
from edgespec.serving.ollama.endpoints import failure


class EmbedBody(Fields):
    without_effect: ClassVar[tuple[str, ...]] = ("options", "keep_alive")

    model: str | None = None
    input: str | Sequence[str | list[int]] = ()
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=0)] = 0


class PromptBody(Fields):
    without_effect: ClassVar[tuple[str, ...]] = ("options", "keep_alive")

    model: str | None = None
    prompt: str = ""


class OllamaEmbed(EmbeddingEndpoint):
    """`/api/embed`: of several inputs, which are cut where they are too long."""

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        warnings = Warnings()
        fields = read_fields(body, EmbedBody, warnings)
        inputs = [fields.input] if isinstance(fields.input, str) else fields.input
        return EmbeddingRequest(
            tuple(inputs) if fields.input else (),
            model_name(fields.model, names, warnings),
            min(fields.dimensions or width, width),
            truncate=fields.truncate,
            warnings=warnings.sentences,
        )

    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        return {
            "model": found.model,
            "created_at": datetime.now(UTC).isoformat(),
            "embeddings": found.vectors.tolist(),
            "total_duration": round(1e9 * found.seconds),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
            **({"warnings": list(request.warnings)} if request.warnings else {}),
        }

    def failure(self, refusal: Refusal) -> Event:
        return failure(refusal)


class OllamaEmbeddings(OllamaEmbed):
    """`/api/embeddings`: of a single prompt, not normalized."""

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        warnings = Warnings()
        fields = read_fields(body, PromptBody, warnings)
        inputs = (fields.prompt,) if fields.prompt else ()
        model = model_name(fields.model, names, warnings)
        return EmbeddingRequest(inputs, model, truncate=True, normalize=False, warnings=warnings.sentences)

    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        return {"embedding": [value for vector in found.vectors.tolist() for value in vector]}
