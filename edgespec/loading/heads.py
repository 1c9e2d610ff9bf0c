"""Opening a draft head beside its target."""

from __future__ import annotations

from edgespec.drafters.kinds import DRAFTER_KINDS
from edgespec.engine.target import Target
from edgespec.errors import PairingError, UsageError
from edgespec.heads.assistant_drafter import AssistantDrafter
from edgespec.heads.families import HiddenStateSource, head_drafter, open_context
from edgespec.heads.head import Head
from edgespec.heads.head_drafter import HeadDrafter
from edgespec.heads.mtp import MTP_NAME, MTPHead
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.compatibility import differs
from edgespec.loading.drafter import file_sources
from edgespec.loading.models import open_drafting_model
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.option import named
from edgespec.planning.plan import Plan


def open_head(
    head: Head, files: ModelFiles, target: Target, shown: HiddenStateSource, plan: Plan, state: LoadState
) -> HeadDrafter | AssistantDrafter:
    """The head as a drafter, which the target shows its hidden states from now on.

    Raises:
        ModelFileError, MemoryLimitError: it cannot be loaded.
        PairingError: its vocabulary is not the target's.
        UsageError: the files to draft from cannot be read; or it computes in its target's cells, and layers
            of the target are elsewhere.
    """
    kind = DRAFTER_KINDS[state.config.speculation.kind or "merged"]
    proposers = kind.new_proposers() + file_sources(target, state)
    if state.config.speculation.draft_window:
        state.notes.append(f"{named('draft_window')} has no effect: the head reads whole texts.")
    if not head.keeps_cells and plan.assignment is not None:
        raise UsageError(
            f"The {head.role} {files.paths[0].name} cannot draft: it reads the keys and values of its "
            "target's last layers, which are on a graphics card or another machine.",
            f"Use {named('gpu_layers', 0)} without {named('workers')}, or name an ordinary drafter.",
        )
    if isinstance(head, MTPHead) and head.files.n_layers > 1:
        state.notes.append(
            f"Of the target's {head.files.n_layers} MTP layers, the first one drafts all tokens."
        )
    own = isinstance(files, MTPLayers)
    context = open_context(
        target.model if own else _open_file(head, files, target, plan, state),
        target.context if head.beside_target else None,
        n_cells=plan.context.n_cells,
        n_sequences=plan.context.n_sequences,
        n_threads=state.n_threads,
        abort=state.abort,
    )
    n_vocab = target.model.vocabulary.n_tokens
    drafter = head_drafter(state.register(context), n_vocab, proposers, name=MTP_NAME if own else None)
    target.show_hidden(shown, drafter)
    return drafter


def _open_file(head: Head, files: ModelFiles, target: Target, plan: Plan, state: LoadState) -> Model:
    """The weights of a head in a file of its own; raises as `open_head`."""
    path = files.paths[0]
    model = open_drafting_model(files, plan, state, mtp=not head.beside_target)
    if differ := differs(target.model.vocabulary, model.vocabulary):
        raise PairingError(
            f"The vocabularies of the head {path.name} and the target differ ({differ}).",
            "Get a head that was converted for this model.",
        )
    return model
