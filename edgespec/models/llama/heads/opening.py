"""Opening the context of a head in a file of its own, of whatever kind it is."""

from __future__ import annotations

from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.heads.assistant import is_assistant
from edgespec.models.gguf.heads.block import is_block_head
from edgespec.models.llama.heads.assistant import AssistantContext
from edgespec.models.llama.heads.blocks.context import BlockContext
from edgespec.models.llama.heads.context import EagleContext, HeadContext
from edgespec.models.llama.runtime.abort import AbortFlag
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
