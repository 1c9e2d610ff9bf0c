"""How much memory a model and its context will take, from the file's header alone."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.models.gguf import ArrayInfo, GGUFHeader

SPARE_CELLS = 512  # for trees behind the text, and rejected cells that wait to be cleared away
USUAL_NODES = 64  # of the largest tree, where nobody says otherwise
GRAPH_BYTES = 64 << 20  # llama.cpp's compute buffers beside the logits, for the models that fit laptops

_HALF = 2  # bytes of a cached key or value element


@dataclass(frozen=True)
class Footprint:
    """Bytes.

    Attributes:
        weights: all tensors.
        cache: keys and values.
        buffers: compute buffers and logits.
    """

    weights: int
    cache: int
    buffers: int

    @property
    def total(self) -> int:
        """Everything."""
        return self.weights + self.cache + self.buffers


def footprint(header: GGUFHeader, *, n_cells: int, n_outputs: int) -> Footprint:
    """The memory for a model with a cache of `n_cells` and `n_outputs` rows of logits."""
    embedding = _number(header, "embedding_length", 0)
    heads = max(_number(header, "attention.head_count", 1), 1)
    heads_kv = _number(header, "attention.head_count_kv", heads)
    key = _number(header, "attention.key_length", embedding // heads)
    value = _number(header, "attention.value_length", embedding // heads)
    cell = (header.block_count or 0) * heads_kv * (key + value) * _HALF
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocabulary = tokens.length if isinstance(tokens, ArrayInfo) else 0
    return Footprint(
        weights=header.tensor_bytes,
        cache=n_cells * cell,
        # Logits stand once in the graph and once in the output buffer.
        buffers=GRAPH_BYTES + 2 * n_outputs * vocabulary * 4,
    )


def readable(n_bytes: int) -> str:
    """Bytes as people read them: 1.5 GiB."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _number(header: GGUFHeader, key: str, default: int) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return value if isinstance(value, int) else default  # per-layer arrays: assume the usual
