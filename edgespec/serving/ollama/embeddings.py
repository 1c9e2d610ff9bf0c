"""`/api/embed`, and the older `/api/embeddings`."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from edgespec.api.completion_request import model_name
from edgespec.api.embeddings import (
    Embedded,
    EmbeddingEndpoint,
    EmbeddingRequest,
    inputs_of,
    object_of,
    warn_of_others,
)
from edgespec.api.endpoint import Event
from edgespec.api.limits import LARGEST_COUNT
from edgespec.api.refusals import Refusal
from edgespec.api.values import boolean, integer, wrong
from edgespec.api.warnings import Warnings
from edgespec.serving.ollama.endpoints import failure


class OllamaEmbed(EmbeddingEndpoint):
    """`/api/embed`: of several inputs, which are cut where they are too long."""

    _FIELDS: tuple[str, ...] = ("model", "input", "truncate", "options", "keep_alive", "dimensions")

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        fields, warnings = object_of(body), Warnings()
        value = fields.get("input")
        inputs = () if value in (None, "", []) else inputs_of("input", value)
        dimensions = integer(fields, "dimensions", 0, LARGEST_COUNT) or width
        model = model_name(fields.get("model"), names, warnings)
        warn_of_others(fields, self._FIELDS, warnings)
        return EmbeddingRequest(
            inputs,
            model,
            min(dimensions, width),
            truncate=boolean(fields, "truncate", default=True),
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

    _FIELDS = ("model", "prompt", "options", "keep_alive")

    def read(self, body: object, names: Collection[str], width: int) -> EmbeddingRequest:
        fields, warnings = object_of(body), Warnings()
        prompt = fields.get("prompt")
        if not isinstance(prompt, str | None):
            raise wrong("prompt", prompt, "a string")
        model = model_name(fields.get("model"), names, warnings)
        warn_of_others(fields, self._FIELDS, warnings)
        inputs = (prompt,) if prompt else ()
        return EmbeddingRequest(inputs, model, truncate=True, normalize=False, warnings=warnings.sentences)

    def response(self, request: EmbeddingRequest, found: Embedded) -> Event:
        return {"embedding": [value for vector in found.vectors.tolist() for value in vector]}
