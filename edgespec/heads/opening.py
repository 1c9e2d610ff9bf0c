"""Opening heads of all families: their contexts, what their target shows them, and drafters that use both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import BackendError
from edgespec.heads.assistant.assistant_context import AssistantContext
from edgespec.heads.assistant.assistant_drafter import AssistantDrafter
from edgespec.heads.block.block_context import BlockContext
from edgespec.heads.block.block_drafter import BlockHeadDrafter
from edgespec.heads.eagle.eagle_context import EagleContext
from edgespec.heads.shared.head import Head
from edgespec.heads.shared.head_context import HeadContext
from edgespec.heads.shared.head_drafter import HeadDrafter
from edgespec.heads.shared.last_states import LastStates
from edgespec.heads.shared.layer_head import LayerHead
from edgespec.heads.shared.layer_tap import LayerTap
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.trials.dry_run import Shape
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.speculation.sources.base import Proposer

HiddenStateSource = LayerTap | LastStates
"""The source of the hidden states that a head reads."""

_CONTEXTS: Mapping[HeadFamily | None, type[HeadContext]] = {
    HeadFamily.EAGLE: EagleContext,
    HeadFamily.BLOCK: BlockContext,
    HeadFamily.ASSISTANT: AssistantContext,
}


def hidden_states(head: Head) -> HiddenStateSource:
    """Return the source of the hidden states that a head reads.

    Raises:
        BackendError: the graphs of this llama.cpp build cannot be read.
    """
    if not isinstance(head, LayerHead):
        return LastStates(head.shown_width)
    try:
        return LayerTap(head.layers, head.target_width)
    except UnsupportedBuild as error:
        raise BackendError(
            f"The head {head.name} cannot read what this llama.cpp build computes: {error}.",
            "Name an ordinary drafter.",
        ) from error


def open_context(
    model: Model,
    beside: Context | None,
    *,
    n_cells: int,
    n_sequences: int,
    n_threads: int,
    abort: AbortFlag | None = None,
) -> HeadContext:
    """The context of a head.

    Args:
        beside: its target's context; None for layers of the target, whose model has them.
        n_cells: of its cache; an assistant has those of its target.

    Raises:
        ModelFileError: the head's file is damaged.
        MemoryLimitError: llama.cpp cannot allocate the context.
        UnsupportedBuild: this llama.cpp build has no heads.
    """
    kind = HeadContext if beside is None else _CONTEXTS[head_family(read_header(model.path))]
    return kind(model, beside, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, abort=abort)


@dataclass(frozen=True)
class HeadContextShape(Shape):
    """The sizes of a head's context."""

    def open(self, model: Model, beside: Context | None = None) -> Context:
        """A context of these sizes."""
        return open_context(model, beside, n_cells=self.n_cells, n_sequences=self.n_sequences, n_threads=1)


def head_drafter(
    context: HeadContext,
    target_vocabulary: int,
    proposers: Sequence[Proposer],
    *,
    name: str | None = None,
) -> HeadDrafter | AssistantDrafter:
    """The drafter that uses a head's context.

    Args:
        target_vocabulary: tokens of the target.
        proposers: sources whose candidates are merged into its trees.
        name: of layers in the target's own file, whose weights are closed with the target; None for a head in
            a file of its own.
    """
    model = context.model
    if isinstance(context, AssistantContext):
        return AssistantDrafter(model, context, target_vocabulary, proposers)
    if isinstance(context, BlockContext):
        return BlockHeadDrafter(model, context, target_vocabulary, proposers)
    return HeadDrafter(model, context, target_vocabulary, proposers, name=name)
