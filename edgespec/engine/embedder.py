"""The embedder: an embedding model and one vector for each text, or a reranker and one score."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.base.option import named
from edgespec.engine.access import ExclusiveAccess
from edgespec.errors import BackendError, ContextLengthError, UsageError
from edgespec.llama.embedding import EmbeddingContext
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.llama.runtime.context import FloatArray
from edgespec.llama.runtime.model import Model

PASS_TOKENS = 512
"""Tokens of a pass over several sequences; a longer one has a pass of its own."""

_TEXT_PER_TOKEN, _SMALL_TEXT = 32, 64 << 10  # characters that are tokenized of a text that may be truncated

Input = str | Sequence[int]
"""A text, or tokens of the model."""


class Embedder:
    """Makes embeddings with a loaded model; made by `edgespec.load_embedder`.

    Calls from several threads take turns.

    Attributes:
        model: the loaded model.
        context: maximum tokens of an input.
        width: elements of an embedding.
        ranks: whether the model is a reranker, which makes no embeddings.
        description: the model and its pooling, in words.
        warnings, notes: what people should know, in sentences.
    """

    def __init__(
        self,
        model: Model,
        computing: EmbeddingContext,
        abort: AbortFlag,
        *,
        context: int,
        ranks: bool = False,
        description: str,
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.context = context
        self.width = computing.width
        self.ranks = ranks
        self.description = description
        self.warnings, self.notes = list(warnings), list(notes)
        self._computing = computing
        self._access = ExclusiveAccess(abort)
        self._framing = model.vocabulary.tokenize("", control=True, bos=True)

    def embed(
        self,
        inputs: Sequence[Input],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        normalize: bool = True,
    ) -> FloatArray:
        """Embed texts, several in a pass.

        Args:
            inputs: texts, which get the tokens that the model begins and ends with; or tokens as they are.
            dimensions: cut embeddings to so many elements, and normalize the rest. Only models that were
                trained for it (Matryoshka) keep their quality.
            truncate: cut inputs that are too long, instead of refusing them.
            normalize: give all embeddings length 1.

        Returns:
            (inputs, elements), in the order of the inputs.

        Raises:
            UsageError: an input is empty or has tokens that the model does not have; or there are not so many
                dimensions.
            ContextLengthError: an input is too long.
            BackendError: the embedder is closed, `cancel` was called, or the model failed.
        """
        if isinstance(inputs, str):
            raise UsageError("embed() takes a list of texts.", "Put the text into a list.")
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise UsageError(f"dimensions must be from 1 to {self.width}, not {dimensions}.")
        self._access.check()
        vectors = self.embed_tokens([self.tokens(one, truncate=truncate) for one in inputs])
        return normalized(vectors[:, :dimensions]) if normalize or dimensions else vectors

    def rank(self, query: str, documents: Sequence[str]) -> FloatArray:
        """(documents,) How well each document fits a query; more is better.

        Returns:
            A reranker's scores, or the cosines between embeddings.

        Raises:
            UsageError, ContextLengthError, BackendError: as `embed`.
        """
        self._access.check()
        return relevance(self.embed_tokens(self.ranked_tokens(query, documents)), len(documents))

    def ranked_tokens(self, query: str, documents: Sequence[str]) -> list[list[int]]:
        """The sequences of which `relevance` gets the vectors: pairs for a reranker; raises as `embed`."""
        if self.ranks:
            return [self._pair(query, document) for document in documents]
        return [self.tokens(text) for text in (query, *documents)]

    def _pair(self, query: str, document: str) -> list[int]:
        vocabulary, template = self.model.vocabulary, self.model.ranking_template
        vocabulary.refuse_longer(query + document, self.context)
        if template is not None:
            given = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda place: given[place[0]], template)
            return self._within(vocabulary.tokenize(text, control=True))
        first, second = (vocabulary.tokenize(text, control=True, bos=True) for text in (query, document))
        first += self._ending(first) and [vocabulary.separator] * vocabulary.separates
        return self._within(first + second[vocabulary.adds_bos :])

    def tokens(self, text: Input, *, truncate: bool = False) -> list[int]:
        """The tokens of an input; raises as `embed`."""
        if self.ranks:
            raise UsageError(
                f"{self.model.path.name} is a reranker and makes no embeddings.", "Use /v1/rerank."
            )
        vocabulary = self.model.vocabulary
        if isinstance(text, str):
            if truncate:
                text = text[: max(_SMALL_TEXT, _TEXT_PER_TOKEN * self.context)]
            else:
                vocabulary.refuse_longer(text, self.context)
            tokens = vocabulary.tokenize(text, control=True, bos=True)
            ending = self._ending(tokens)
        else:
            tokens, ending = list(text), []
            for token in tokens:
                if not 0 <= token < vocabulary.n_tokens:
                    raise UsageError(
                        f"There is no token {token}.", f"Tokens are 0 to {vocabulary.n_tokens - 1}."
                    )
        if not tokens:
            raise UsageError("An input is empty.")
        if len(tokens) > self.context and truncate:
            return tokens[: self.context - len(ending)] + ending
        return self._within(tokens)

    def _within(self, tokens: list[int]) -> list[int]:
        """The tokens, unless there are too many."""
        if len(tokens) > self.context:
            raise ContextLengthError(
                f"An input has {len(tokens)} tokens, and the maximum is {self.context}.",
                f"Shorten it, or raise {named('context')} if the model was trained for more.",
            )
        return tokens

    def _ending(self, tokens: list[int]) -> list[int]:
        """The tokens that the model puts behind every text."""
        lengths = range(min(len(self._framing), len(tokens)), 0, -1)
        return next((tokens[-n:] for n in lengths if tokens[-n:] == self._framing[-n:]), [])

    def n_in_pass(self, lengths: Iterable[int]) -> int:
        """The number of leading sequences that share the next pass.

        Args:
            lengths: tokens of each sequence.
        """
        total = count = 0
        for length in lengths:
            total += length
            if count and (total > PASS_TOKENS or count == self._computing.n_sequences):
                break
            count += 1
        return count

    def embed_tokens(self, sequences: Sequence[Sequence[int]]) -> FloatArray:
        """(sequences, width) Embeddings as the model pools them, not normalized.

        Args:
            sequences: of tokens as `tokens` gives them.

        Raises:
            BackendError: as `embed`.
        """

        found = [np.empty((0, self.width), dtype=np.float32)]
        start, call = 0, self._access.call()
        try:
            with call.active, self._access.turn(call):
                while start < len(sequences):
                    end = start + self.n_in_pass(len(tokens) for tokens in sequences[start:])
                    with self._access.held():
                        found.append(self._computing.embed(sequences[start:end]))
                    start = end
        except DecodeAborted:
            self._access.check()
            raise BackendError("The embeddings were cancelled.") from None
        vectors = np.concatenate(found)
        if not np.isfinite(vectors).all():
            raise BackendError(f"'{self.model.path.name}' computes embeddings that are not numbers.")
        return vectors

    def cancel(self) -> None:
        """End the calls that were made so far; they raise BackendError. May be called from any thread."""
        self._access.cancel()

    def close(self) -> None:
        """Free the model; may be called from any thread, and repeatedly."""
        self._access.close(self.model.close)

    @property
    def closed(self) -> bool:
        """True if the embedder is closed."""
        return self._access.closed

    def __repr__(self) -> str:
        """Return, for example, <Embedder bert.gguf, pooling mean; context 512, 384 dimensions>."""
        state = "closed" if self.closed else f"context {self.context}, {self.width} dimensions"
        return f"<Embedder {self.description}; {state}>"

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def relevance(vectors: FloatArray, n_documents: int) -> FloatArray:
    """(n_documents,) How well documents fit a query, from the vectors of `Embedder.ranked_tokens`."""
    if len(vectors) == n_documents:  # of pairs
        return vectors[:, 0]
    unit = normalized(vectors)
    cosines: FloatArray = unit[1:] @ unit[0]
    return cosines


def normalized(vectors: FloatArray) -> FloatArray:
    """The vectors, scaled to length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: FloatArray = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled
