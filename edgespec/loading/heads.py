"""Opening a draft head beside its target."""

from __future__ import annotations

from edgespec.drafters.head import HeadDrafter
from edgespec.drafters.kinds import DRAFTER_KINDS
from edgespec.engine.target import Target
from edgespec.errors import BackendError, PairingError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.loading.drafter import file_sources
from edgespec.loading.models import open_model
from edgespec.loading.plan import Plan
from edgespec.loading.state import LoadState
from edgespec.models.gguf.heads import further_layers, is_head, read_head
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.heads.context import HeadContext
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.tokenizer.compatibility import differs


def head_tap(drafter: ModelFiles | None) -> LayerTap | None:
    """Return the tap that copies the hidden states that the drafter reads; None if it is no head.

    Raises:
        BackendError: the graphs of this llama.cpp build cannot be read.
    """
    if drafter is None or not is_head(drafter.headers[0]):
        return None
    head = read_head(drafter.headers[0])
    try:
        return LayerTap(head.layers, head.target_width)
    except UnsupportedBuild as error:
        raise BackendError(
            f"The head {head.name} cannot read what this llama.cpp build computes: {error}.",
            "Name an ordinary drafter.",
        ) from error


def require_hidden_states(model: Model, context: Context, tap: LayerTap) -> None:
    """Make sure that the target shows what a head reads; empties the context's cache.

    Raises:
        PairingError: the target keeps a running state.
        BackendError: its hidden states are not found.
    """
    if model.keeps_recurrent_state:
        raise PairingError(
            f"'{model.path.name}' keeps a running state, and heads are not used with such targets.",
            "Name an ordinary drafter.",
        )
    tap.require_rows(context)


def open_head(files: ModelFiles, target: Target, tap: LayerTap, plan: Plan, state: LoadState) -> HeadDrafter:
    """The head as a drafter, which the target shows its hidden states from now on.

    Raises:
        ModelFileError, MemoryLimitError: it cannot be loaded.
        PairingError: its vocabulary is not the target's.
        UsageError: the files to draft from cannot be read.
    """
    path = files.paths[0]
    model = open_model(path, state, memory_map=plan.memory.memory_map)
    if differ := differs(target.model.vocabulary, model.vocabulary):
        raise PairingError(
            f"The vocabularies of the head {path.name} and the target differ ({differ}).",
            "Get a head that was converted for this model.",
        )
    context = state.keep(
        HeadContext(
            model,
            target.context,
            n_cells=plan.context.n_cells,
            n_sequences=plan.context.n_sequences,
            n_threads=state.n_threads,
            abort=state.abort,
        )
    )
    kind = DRAFTER_KINDS[state.config.speculation.kind or "merged"]
    proposers = kind.new_proposers() + file_sources(target, state)
    drafter = HeadDrafter(model, context, target.model.vocabulary.n_tokens, proposers)
    target.show_hidden(tap, drafter)
    return drafter


def note_further_layers(target: ModelFiles, state: LoadState) -> None:
    """Say that the target's own layers for further tokens are not used, and why, if it has some."""
    count = further_layers(target.headers[0])
    if not count or not state.config.speculation.drafts:
        return
    layers = "a layer that predicts" if count == 1 else f"{count} layers that predict"
    why = (
        "llama.cpp computes them in a context of their own, beside the target's, which EdgeSpec does not open"
    )
    state.notes.append(
        f"The target has {layers} further tokens (MTP). They do not draft: {why}. They are left out while "
        "loading, and take no memory. EdgeSpec drafts with heads in files of their own."
    )
