"""Embedding models and rerankers: their files, and how the states of a sequence become one vector."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import UsageError
from edgespec.models.gguf.types import GGUFHeader

# llama.cpp's numbers of the kinds of pooling; 0 leaves every token its own vector.
_POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_EXAMPLE = "Qwen/Qwen3-Embedding-0.6B-GGUF"
_ENCODERS = (
    *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert"),
    *("eurobert", "gemma-embedding", "llama-embed", "t5encoder"),
)


@dataclass(frozen=True)
class EmbeddingShape:
    """The properties of an embedding model."""

    # "mean" of all tokens' states, that of the first one ("cls") or the "last" one, or a score ("rank")
    pooling: str
    causal: bool  # whether a token sees only those before it, so a sequence may be read in pieces
    context: int  # tokens of the longest sequence; 0 if the file does not say
    width: int  # elements of a token's state; 0 if the file does not say

    @property
    def ranks(self) -> bool:
        """True if the model is a reranker: it scores a document for a query."""
        return self.pooling == "rank"

    @property
    def in_pieces(self) -> bool:
        """True if a sequence may be read in several passes: all that counts is in the last row."""
        return self.causal and self.pooling == "last"


def embedding_shape(header: GGUFHeader) -> EmbeddingShape | None:
    """The shape of an embedding model; None if the file is of another kind."""
    architecture = header.architecture
    pooling = _POOLING.get(header.metadata.get(f"{architecture}.pooling_type", 0))
    if pooling is None or header.is_adapter:
        return None
    causal = header.metadata.get(f"{architecture}.attention.causal", architecture not in _ENCODERS)
    width = header.metadata.get(f"{architecture}.embedding_length")
    return EmbeddingShape(
        pooling, bool(causal), header.context_length or 0, width if isinstance(width, int) else 0
    )


def require_embeddings(header: GGUFHeader) -> EmbeddingShape:
    """The shape of an embedding model.

    Raises:
        UsageError: it is none.
    """
    shape = embedding_shape(header)
    if shape is None:
        raise no_embeddings(header.path.name)
    return shape


def no_embeddings(name: str) -> UsageError:
    """The error for a model that makes no embeddings."""
    return UsageError(
        f"{name} makes no embeddings.",
        f"Serve an embedding model, such as {_EXAMPLE}: edgespec serve {_EXAMPLE}",
    )


def require_generation(header: GGUFHeader) -> None:
    """Refuse a model that writes no text.

    Raises:
        UsageError: it is an embedding model, an encoder, or a reranker.
    """
    name, architecture = header.path.name, header.architecture
    shape = embedding_shape(header)
    if shape is not None:
        does = "a reranker: it scores documents" if shape.ranks else "an embedding model: it makes embeddings"
        raise UsageError(f"{name} is {does} and writes no text.", f"Serve it: edgespec serve {header.path}")
    if architecture in _ENCODERS:
        raise UsageError(
            f"{name} is an encoder, which writes no text, and its file states no pooling, so it makes no "
            "embeddings either.",
            f"Get a conversion whose file has {architecture}.pooling_type.",
        )
