"""Setting up a draft head in a file of its own beside its target, whatever kind of head it is."""

from __future__ import annotations

from edgespec.models.gguf.assistant import is_assistant
from edgespec.models.gguf.header import read_header
from edgespec.models.llama.heads.assistant import AssistantContext
from edgespec.models.llama.heads.context import EagleContext, HeadContext
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model


def open_beside_target(model: Model, target: Context, *, n_cells: int, n_sequences: int) -> HeadContext:
    """A context of a head, with one thread, to see what it takes and whether llama.cpp survives it.

    Args:
        n_cells: of its cache; an assistant has those of its target.

    Raises:
        ModelFileError: the head's header cannot be read.
        MemoryLimitError: llama.cpp cannot allocate the context.
        UnsupportedBuild: this llama.cpp build has no heads.
    """
    if is_assistant(read_header(model.path)):
        return AssistantContext(model, target, n_sequences=n_sequences, n_threads=1)
    return EagleContext(model, target, n_cells=n_cells, n_sequences=n_sequences, n_threads=1)
