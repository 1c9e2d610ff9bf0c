"""Opening a draft head beside its target: a head, an assistant, or a layer of the target's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from edgespec.drafters.assistant import AssistantDrafter
from edgespec.drafters.block_head import BlockHeadDrafter
from edgespec.drafters.head import HeadDrafter
from edgespec.drafters.kinds import DRAFTER_KINDS
from edgespec.engine.target import Target
from edgespec.errors import BackendError, PairingError, UsageError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.loading.drafter import file_sources
from edgespec.loading.models import open_drafting_model
from edgespec.loading.plan import Plan
from edgespec.loading.state import LoadState
from edgespec.models.gguf.heads.assistant import is_assistant, read_assistant
from edgespec.models.gguf.heads.block import BlockKind, is_block_head, read_any_head
from edgespec.models.gguf.heads.eagle import is_head
from edgespec.models.gguf.heads.markov import MarkovHead
from edgespec.models.gguf.heads.mtp import MTP_NAME
from edgespec.models.gguf.heads.mtp_file import MTPFile
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.llama.heads.assistant import AssistantContext
from edgespec.models.llama.heads.block import BlockContext
from edgespec.models.llama.heads.context import EagleContext, HeadContext, MTPContext
from edgespec.models.llama.heads.last_states import LastStates
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.tokenizer.compatibility import differs
from edgespec.option import named
from edgespec.speculation.sources.base import Proposer

Shown = LayerTap | LastStates
"""The source of the hidden states that a head reads."""


def hidden_states(drafter: ModelFiles | None) -> Shown | None:
    """Return the source of the hidden states that the drafter reads; None if it is no head.

    Raises:
        BackendError: the graphs of this llama.cpp build cannot be read.
    """
    if isinstance(drafter, MTPLayers | MTPFile):
        return LastStates(drafter.width)
    if drafter is None or not is_head(drafter.headers[0]):
        return None
    if is_assistant(drafter.headers[0]):
        return LastStates(read_assistant(drafter.headers[0]).target_width)
    head = read_any_head(drafter.headers[0])
    try:
        return LayerTap(head.layers, head.target_width)
    except UnsupportedBuild as error:
        raise BackendError(
            f"The head {head.name} cannot read what this llama.cpp build computes: {error}.",
            "Name an ordinary drafter.",
        ) from error


def require_hidden_states(model: Model, context: Context, shown: Shown) -> None:
    """Make sure that the target shows what a head reads; empties the context's cache.

    Raises:
        BackendError: its hidden states are not found.
    """
    shown.require_rows(context)


def open_head(
    files: ModelFiles, target: Target, shown: Shown, plan: Plan, state: LoadState
) -> HeadDrafter | AssistantDrafter:
    """The head as a drafter, which the target shows its hidden states from now on.

    Raises:
        ModelFileError, MemoryLimitError: it cannot be loaded.
        PairingError: its vocabulary is not the target's.
        UsageError: the files to draft from cannot be read; or it is an assistant, and layers of its target
            are elsewhere.
    """
    kind = DRAFTER_KINDS[state.config.speculation.kind or "merged"]
    proposers = kind.new_proposers() + file_sources(target, state)
    n_vocab = target.model.vocabulary.n_tokens
    if state.config.speculation.draft_window:
        state.notes.append(f"{named('draft_window')} has no effect: the head reads whole texts.")
    if is_assistant(files.headers[0]):
        assistant = _open_assistant(files, target, plan, state)
        beside = AssistantDrafter(assistant.model, assistant, n_vocab, proposers)
        target.show_hidden(shown, beside)
        return beside
    if not isinstance(files, MTPLayers) and is_block_head(files.headers[0]):
        return _open_block_head(files, target, shown, plan, state, proposers)
    if isinstance(files, MTPLayers | MTPFile) and files.n_layers > 1:
        state.notes.append(f"Of the target's {files.n_layers} MTP layers, the first one drafts all tokens.")
    if isinstance(files, MTPLayers):
        model, name = target.model, MTP_NAME
        context: HeadContext = MTPContext(model, **_sizes(plan, state))
    elif isinstance(files, MTPFile):
        model, name = _open_file(files, target, plan, state), None
        context = MTPContext(model, **_sizes(plan, state))
    else:
        model, name = _open_file(files, target, plan, state), None
        context = EagleContext(model, target.context, **_sizes(plan, state))
    drafter = HeadDrafter(model, state.register(context), n_vocab, proposers, name=name)
    target.show_hidden(shown, drafter)
    return drafter


def _open_block_head(
    files: ModelFiles,
    target: Target,
    shown: Shown,
    plan: Plan,
    state: LoadState,
    proposers: Sequence[Proposer],
) -> BlockHeadDrafter:
    """A block head as a drafter; raises as `open_head`."""
    model = _open_file(files, target, plan, state)
    context = state.register(BlockContext(model, target.context, **_sizes(plan, state)))
    bias = state.register(MarkovHead(context.head)) if context.head.kind is BlockKind.DSPARK else None
    drafter = BlockHeadDrafter(model, context, target.model.vocabulary.n_tokens, proposers, bias)
    target.show_hidden(shown, drafter)
    return drafter


def _open_assistant(files: ModelFiles, target: Target, plan: Plan, state: LoadState) -> AssistantContext:
    """The context of an assistant, in the cells of its target; raises as `open_head`."""
    if plan.assignment is not None:
        raise UsageError(
            f"The assistant {files.paths[0].name} cannot draft: it reads the keys and values of its target's "
            "last layers, which are on a graphics card or another machine.",
            f"Use {named('gpu_layers', 0)} without {named('workers')}, or name an ordinary drafter.",
        )
    return state.register(
        AssistantContext(
            _open_file(files, target, plan, state),
            target.context,
            n_sequences=target.context.n_sequences,
            n_threads=state.n_threads,
            abort=state.abort,
        )
    )


class _Sizes(TypedDict):
    n_cells: int
    n_sequences: int
    n_threads: int
    abort: AbortFlag


def _sizes(plan: Plan, state: LoadState) -> _Sizes:
    return {
        "n_cells": plan.context.n_cells,
        "n_sequences": plan.context.n_sequences,
        "n_threads": state.n_threads,
        "abort": state.abort,
    }


def _open_file(files: ModelFiles, target: Target, plan: Plan, state: LoadState) -> Model:
    """The weights of a head in a file of its own; raises as `open_head`."""
    path = files.paths[0]
    model = open_drafting_model(files, plan, state, mtp=isinstance(files, MTPFile))
    if differ := differs(target.model.vocabulary, model.vocabulary):
        raise PairingError(
            f"The vocabularies of the head {path.name} and the target differ ({differ}).",
            "Get a head that was converted for this model.",
        )
    return model
