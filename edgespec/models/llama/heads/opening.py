"""Opening the context of a head in a file of its own, of whatever kind it is, and trying it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.heads.assistant import is_assistant
from edgespec.models.gguf.heads.block import is_block_head, read_any_head
from edgespec.models.llama.heads.assistant import AssistantContext
from edgespec.models.llama.heads.block import BlockContext
from edgespec.models.llama.heads.context import EagleContext, HeadContext
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model


def head_context(
    model: Model,
    beside: Context,
    *,
    n_cells: int,
    n_sequences: int,
    n_threads: int,
    abort: AbortFlag | None = None,
) -> HeadContext:
    """The context of a head beside its target's.

    Args:
        n_cells: of its cache; an assistant has those of its target.

    Raises:
        ModelFileError: the head's header is damaged.
        MemoryLimitError: llama.cpp cannot allocate the context.
        UnsupportedBuild: this llama.cpp build has no heads.
    """
    header = read_header(model.path)
    if is_assistant(header):
        return AssistantContext(model, beside, n_sequences=n_sequences, n_threads=n_threads, abort=abort)
    kind = BlockContext if is_block_head(header) else EagleContext
    return kind(model, beside, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, abort=abort)


def draft_from_zeros(small: HeadContext, known: int) -> None:
    """Draft a token, or a block, as if all that the head reads of its target were zero.

    Args:
        known: tokens that the target has cached of sequence 0.

    Raises:
        BackendError: llama.cpp refuses the rows.
    """
    if isinstance(small, AssistantContext):
        small.draft([0], [known], [0], np.zeros((1, small.width), dtype=np.float32))
    elif isinstance(small, BlockContext):
        small.decode(small.sequence_batch(np.zeros((known, small.width), dtype=np.float32), 0))
        small.decode(small.block_batch(0, known))
        small.logits()
        if small.candidates:
            small.pairs(1)
    else:
        head = read_any_head(read_header(small.model.path))
        hidden = np.zeros((known, len(head.layers) * head.target_width), dtype=np.float32)
        features = small.encode(hidden)
        rows = TokenBatch.run([0] * known, 0, n_sequences=1, logits="all")
        small.decode(replace(rows, features=features))
        small.logits()
        small.features(known)
