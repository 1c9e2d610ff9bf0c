"""Families of draft heads: which one a file is of, and opening a head with what it reads of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.errors import BackendError
from edgespec.heads.head import Head, LayerHead
from edgespec.heads.mtp import MTPFile, MTPHead, read_mtp_file
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.dry_run import Shape
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.speculation.sources.base import Proposer

if TYPE_CHECKING:  # a family's modules are imported when a head is opened
    from edgespec.heads.assistant_drafter import AssistantDrafter
    from edgespec.heads.head_context import HeadContext
    from edgespec.heads.head_drafter import HeadDrafter
    from edgespec.heads.hidden_states import LastStates, LayerTap

    HiddenStateSource = LayerTap | LastStates
    """The source of the hidden states that a head reads."""


def drafter_files(header: GGUFHeader) -> ModelFiles:
    """All files of a drafter, whatever kind it is, that `header` is the first or only file of.

    Raises:
        ModelFileError: a part is missing or damaged; or as `read_mtp_file`.
    """
    if head_family(header) is not HeadFamily.MTP:
        return ModelFiles.of(header)
    return read_mtp_file(
        [header if path == header.path else read_header(path) for path in split_paths(header)]
    )


def head_of(drafter: ModelFiles) -> Head | None:
    """The head that drafts; None if a model does."""
    if isinstance(drafter, MTPLayers | MTPFile):
        return MTPHead(drafter)
    header = drafter.headers[0]
    match head_family(header):
        case HeadFamily.EAGLE:
            from edgespec.heads.eagle import read_eagle_head

            return read_eagle_head(header)
        case HeadFamily.BLOCK:
            from edgespec.heads.block import read_block_head

            return read_block_head(header)
        case HeadFamily.ASSISTANT:
            from edgespec.heads.assistant import read_assistant_head

            return read_assistant_head(header)
    return None


def head_kind(header: GGUFHeader) -> str:
    """The kind of a head, as people call it; empty if the file is a model."""
    family = head_family(header)
    if family is not HeadFamily.BLOCK:
        return "" if family is None else family.value
    from edgespec.heads.block import block_kind

    return block_kind(header).value


def head_recipe(header: GGUFHeader) -> str:
    """The kind of a drafter that was trained for its target, for people; empty for models."""
    family, kind = head_family(header), head_kind(header)
    return f"head ({kind})" if family in (HeadFamily.EAGLE, HeadFamily.BLOCK) else kind


def hidden_states(head: Head) -> HiddenStateSource:
    """Return the source of the hidden states that a head reads.

    Raises:
        BackendError: the graphs of this llama.cpp build cannot be read.
    """
    from edgespec.heads.hidden_states import LastStates, LayerTap

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
        UnsupportedBuild: this llama.cpp build has no heads.
    """
    from edgespec.heads.assistant import AssistantContext
    from edgespec.heads.block import BlockContext
    from edgespec.heads.eagle import EagleContext
    from edgespec.heads.head_context import HeadContext

    contexts: Mapping[HeadFamily | None, type[HeadContext]] = {
        HeadFamily.EAGLE: EagleContext,
        HeadFamily.BLOCK: BlockContext,
        HeadFamily.ASSISTANT: AssistantContext,
    }
    kind = HeadContext if beside is None else contexts[head_family(read_header(model.path))]
    return kind(model, beside, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, abort=abort)


@dataclass(frozen=True)
class HeadContextShape(Shape):
    """The sizes of a head's context."""

    def open(self, model: Model, beside: Context | None = None) -> Context:
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
    from edgespec.heads.assistant import AssistantContext
    from edgespec.heads.assistant_drafter import AssistantDrafter
    from edgespec.heads.block import BlockContext
    from edgespec.heads.block_drafter import BlockHeadDrafter
    from edgespec.heads.head_drafter import HeadDrafter

    model = context.model
    if isinstance(context, AssistantContext):
        return AssistantDrafter(model, context, target_vocabulary, proposers)
    if isinstance(context, BlockContext):
        return BlockHeadDrafter(model, context, target_vocabulary, proposers)
    return HeadDrafter(model, context, target_vocabulary, proposers, name=name)
