"""Serving embeddings: the model, its worker, and the handler of requests."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

import numpy as np

from edgespec.api.embeddings import (
    Embedded,
    EmbeddingEndpoint,
    EmbeddingRequest,
    Vectors,
)
from edgespec.engine.embedder import Embedder, normalized
from edgespec.generation.result import Generation
from edgespec.serving.model_worker import ModelWorker, Pending
from edgespec.serving.ollama.model_card import ModelCard
from edgespec.serving.request_bodies import RequestBody, parse
from edgespec.serving.request_handler import RequestHandler
from edgespec.serving.response_sender import ResponseSender

_LOOKED_AT = 512  # sequences that may share the next pass


class ServedEmbedder:
    """A loaded embedding model; closes it if the description cannot be made."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        try:
            self.card = ModelCard(embedder.model.path, embedder.context, ["embedding"])
        except BaseException:
            embedder.close()
            raise

    def cancel(self) -> None:
        """End the pass that is running."""
        self.embedder.cancel()

    def close(self) -> None:
        self.embedder.close()


@dataclass(eq=False, kw_only=True)
class PendingEmbeddings(Pending[Vectors]):
    sequences: list[list[int]]  # the tokens of its inputs
    vectors: list[Vectors] = field(default_factory=list)  # their embeddings so far, in that order

    @property
    def left(self) -> list[tuple[PendingEmbeddings, list[int]]]:
        """The sequences that were not embedded yet, each with this request."""
        return [(self, tokens) for tokens in self.sequences[len(self.vectors) :]]


class EmbeddingWorker(ModelWorker[ServedEmbedder, PendingEmbeddings]):
    """Makes embeddings, of several requests in a pass: each gives one sequence after another in turn."""

    def _answer(self, model: ServedEmbedder) -> None:
        embedder = model.embedder
        while self._running or self.wait():
            while len(self._running) < self.parallel and self._take() is not None:
                pass
            for pending in [pending for pending in self._running if pending.cancelled]:
                self._done(pending, None)
            oldest_first = sorted(self._running, key=lambda pending: pending.asked_at)
            rounds = zip_longest(*(pending.left for pending in oldest_first))
            order = list(islice((one for one in chain.from_iterable(rounds) if one), _LOOKED_AT))
            shared = order[: embedder.n_in_pass(len(tokens) for _, tokens in order)]
            if not shared:
                continue
            start = time.perf_counter()
            vectors = embedder.embed_tokens([tokens for _, tokens in shared])
            self.metrics.pass_done(len(shared), time.perf_counter() - start, 0)
            for (pending, _), vector in zip(shared, vectors, strict=True):
                pending.vectors.append(vector)
                if not pending.left:
                    pending.deliver(np.stack(pending.vectors))
                    self._done(pending, None)


@dataclass(frozen=True)
class _Prepared:
    """A request that was read, and the tokens of its inputs."""

    request: EmbeddingRequest
    sequences: list[list[int]]
    model: ServedEmbedder


class EmbeddingHandler(RequestHandler[EmbeddingWorker, EmbeddingEndpoint]):
    """Answers requests for embeddings; see `RequestHandler`."""

    async def _respond(
        self,
        sender: ResponseSender,
        endpoint: EmbeddingEndpoint,
        body: RequestBody,
        answers: list[Generation],
    ) -> None:
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        with self.worker.queue_slot() as slot:
            prepared = await loop.run_in_executor(self._threads, self._prepare, body, endpoint)
            self.bodies.drop(body)
            request, n_tokens = prepared.request, sum(map(len, prepared.sequences))
            self.worker.metrics.prompt_accepted(n_tokens)
            sender.warnings = request.warnings
            vectors: Vectors = np.empty((0, prepared.model.embedder.width), dtype=np.float32)
            if prepared.sequences:
                pending = PendingEmbeddings(slot=slot, sequences=prepared.sequences)
                try:
                    self.worker.submit(pending, prepared.model)
                    async for found in pending.results():
                        vectors = found
                finally:
                    self.worker.cancel(pending)  # does nothing if it is done

            def response() -> bytes:
                cut = vectors[:, : request.dimensions]
                embedded = Embedded(
                    request.model or self._model,
                    normalized(cut) if request.normalize else cut,
                    n_tokens,
                    time.perf_counter() - start,
                )
                return json.dumps(endpoint.response(request, embedded)).encode()

            # Millions of numbers are not written in the thread of all connections.
            await sender.whole(await loop.run_in_executor(self._threads, response))

    def _prepare(self, received: RequestBody, endpoint: EmbeddingEndpoint) -> _Prepared:
        """The request in a body, and the tokens of its inputs; called in a thread."""
        limits = self.limits
        with self.worker.borrowed() as served:
            embedder = served.embedder
            content = received.decoded(limits.body)
            body = parse(content, values=limits.values + embedder.context, depth=limits.depth)
            request = endpoint.read(body, self.names, embedder.width)
            sequences = request.sequences(embedder)
        return _Prepared(request, sequences, served)
