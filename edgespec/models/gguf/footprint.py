"""The memory of a model and its context, estimated from the file's header."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.base.option import named
from edgespec.errors import UsageError
from edgespec.models.gguf.layers import LOOKED_UP, ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader

_SPARE_CELLS = 512  # for trees after the text, and for rejected cells until the next compaction
USUAL_NODES = 64  # of the largest tree, by default
USUAL_TEXT = 512  # tokens of one of many texts, prompt and answer together, where nothing else is known

_HALF, _FLOAT = 2, 4  # bytes of an element of the mask, and of an activation
CACHE_TYPES = {"f16": 2.0, "q8_0": 34 / 32}
"""Types of cached keys and values, and bytes of an element."""
CACHE_BLOCK = 32  # elements of a head that a quantized type stores together
_SCORES = 64 * 4  # bytes of a cell's scores for as many queries as are taken at once, at most
_THREAD_BYTES = 1 << 20  # for kernels' scratch memory and the stack, for each thread
_TOKEN_BYTES, _MERGE_BYTES = 160, 150  # for an entry in llama.cpp's vocabulary, and for a merge


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory."""

    weights: int  # all tensors
    cache: int  # keys and values, and running states
    buffers: int  # compute buffers and logits
    # those of the weights that can be left in the file where others are streamed; see `ModelFiles.tables`
    tables: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.buffers


def cells_for(context: int, tree_budget: int = 0) -> int:
    """Cells of a cache that holds a text of so many tokens, and its trees."""
    return context + _SPARE_CELLS + tree_budget


def footprint(
    files: ModelFiles,
    *,
    n_cells: int,
    n_outputs: int = USUAL_NODES,
    n_rows: int = USUAL_NODES,
    n_threads: int = 1,
    kv: str = "f16",
) -> Footprint:
    """The memory for a model, estimated from its headers.

    Args:
        n_cells: of the cache.
        n_outputs: rows of logits that can be read after a pass.
        n_rows: most rows of a pass.
        kv: type of cached keys and values, of CACHE_TYPES.
    """
    header = files.headers[0]
    embedding = _number(header, "embedding_length", 0)
    hidden = _number(header, "feed_forward_length", 4 * embedding)
    # At the peak: three rows of a feed-forward block, four of the residual stream and the mask; or the
    # logits.
    rows = n_rows * ((3 * hidden + 4 * embedding) * _FLOAT + n_cells * _HALF)
    logits = n_outputs * header.n_vocab * _FLOAT
    return Footprint(
        weights=files.tensor_bytes,
        cache=n_cells * cell_bytes(header, kv) + state_bytes(header),
        # Logits are in the graph and in the output buffer.
        buffers=max(rows, logits) + logits + work_bytes(files.headers, n_rows, n_threads, n_cells),
    )


def head_sizes(header: GGUFHeader) -> tuple[int, int]:
    """Elements of a key and of a value, of one head."""
    usual = _number(header, "embedding_length", 0) // _heads(header)
    key = _number(header, "attention.key_length", usual)
    return key, _number(header, "attention.value_length", usual)


def require_cache_type(kv: str, header: GGUFHeader) -> None:
    """Refuse a type of cached keys and values that a model's heads do not fit.

    Raises:
        UsageError: they do not.
    """
    sizes = head_sizes(header)
    if kv != "f16" and any(size % CACHE_BLOCK for size in sizes):
        raise UsageError(
            f"{header.path.name} has heads of {max(sizes)} elements, but {kv} needs blocks of {CACHE_BLOCK}.",
            f"Leave out {named('kv')}, or use {named('kv', 'f16')}.",
        )


def query_elements(header: GGUFHeader) -> int:
    """Elements of a row's queries, in all heads of all layers."""
    return (header.block_count or 0) * _heads(header) * head_sizes(header)[0]


def cell_bytes(header: GGUFHeader, kv: str = "f16") -> int:
    """Estimate the bytes of one token's keys and values from the model's header.

    Args:
        kv: type of cached keys and values, of CACHE_TYPES.
    """
    heads_kv = _number(header, "attention.head_count_kv", _heads(header))
    return round(_attention_layers(header) * heads_kv * sum(head_sizes(header)) * CACHE_TYPES[kv])


def state_bytes(header: GGUFHeader) -> int:
    """The running state of one sequence, in the layers of a hybrid that have no attention."""
    inner, size = _number(header, "ssm.inner_size", 0), _number(header, "ssm.state_size", 0)
    groups, reach = _number(header, "ssm.group_count", 0), _number(header, "ssm.conv_kernel", 1)
    elements = size * inner + (reach - 1) * (inner + 2 * groups * size)
    return ((header.block_count or 0) - _attention_layers(header)) * elements * _FLOAT


def _attention_layers(header: GGUFHeader) -> int:
    """Layers that keep keys and values: all, or one in so many of a hybrid."""
    return (header.block_count or 0) // max(_number(header, "full_attention_interval", 1), 1)


def work_bytes(headers: Iterable[GGUFHeader], n_rows: int, n_threads: int, n_cells: int) -> int:
    """The kernels' scratch memory, which llama.cpp does not report.

    Activations are converted for a product. In attention, each thread keeps the scores of a few queries for
    all cells.

    Args:
        headers: of all the model's files.
    """
    widest = 0
    for header in headers:
        experts = _number(header, "expert_used_count", 1)
        for tensor in header.tensors:
            quantized = tensor.n_bytes < 1.5 * math.prod(tensor.shape)
            if len(tensor.shape) in (2, 3) and not tensor.name.startswith(("token_embd", LOOKED_UP)):
                row = tensor.shape[0] * (experts if len(tensor.shape) == 3 else 1)
                widest = max(widest, round(row * (1.4 if quantized else _FLOAT)))
    return n_rows * widest + n_threads * (_THREAD_BYTES + n_cells * _SCORES)


def vocabulary_bytes(header: GGUFHeader) -> int:
    """Estimate what llama.cpp allocates for a model besides tensors: mostly its vocabulary."""
    merges = header.metadata.get("tokenizer.ggml.merges")
    n_merges = merges.length if isinstance(merges, ArrayInfo) else 0
    return header.n_vocab * _TOKEN_BYTES + n_merges * _MERGE_BYTES


def _heads(header: GGUFHeader) -> int:
    return max(_number(header, "attention.head_count", 1), 1)


def _number(header: GGUFHeader, key: str, default: int) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return value if isinstance(value, int) else default  # for per-layer arrays, assume the default
