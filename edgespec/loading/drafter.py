"""Opening the drafter, the tree policy, and what a pair is known to cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.base.option import named
from edgespec.costs.pass_time import RoundCosts
from edgespec.drafters.draft_sequence import WHOLE, DraftWindow
from edgespec.engine.target import Target
from edgespec.errors import PairingError, UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.secret import user_secret
from edgespec.heads.families import head_drafter, open_context
from edgespec.heads.head import Head
from edgespec.heads.mtp import MTP_NAME, MTPHead
from edgespec.llama.row_rule import ANY_ROWS
from edgespec.llama.runtime.abort import DecodeAborted
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.compatibility import differs
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.loading.models import open_drafting_model
from edgespec.loading.state import LoadState
from edgespec.measure.initial_costs import initial_costs
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.planning.draft_window import draft_window
from edgespec.planning.plan import Plan, max_nodes
from edgespec.profiles.store import ProfileKeys
from edgespec.profiles.table_file import TableFile
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.growth import TreeLimits, usual_limits
from edgespec.speculation.learning.tables import TableStore
from edgespec.speculation.policies import TreePolicy, tree_policy
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.corpus import FileSource
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource

if TYPE_CHECKING:
    from edgespec.heads.assistant_drafter import AssistantDrafter
    from edgespec.heads.families import HiddenStateSource
    from edgespec.heads.head_drafter import HeadDrafter


@dataclass(frozen=True)
class DrafterKind:
    model: bool  # whether a small model grows the tree
    # the sources without a model that add to the tree, each to be called once a drafter
    proposers: Sequence[Callable[[], Proposer]] = ()

    def new_proposers(self) -> list[Proposer]:
        return [create() for create in self.proposers]


NO_DRAFTER = "none"

DRAFTER_KINDS: Mapping[str, DrafterKind] = {
    NO_DRAFTER: DrafterKind(model=False),
    "lookup": DrafterKind(model=False, proposers=[TextSource, RecycledSource]),
    "model": DrafterKind(model=True),
    "merged": DrafterKind(model=True, proposers=[TextSource, RecycledSource]),
}


def drafter_name(files: ModelFiles | None, state: LoadState) -> str:
    """The name of the drafter in the keys of saved pair profiles."""
    if files is not None:
        return files.headers[0].fingerprint
    return "lookup" if state.config.speculation.drafts else NO_DRAFTER


def open_policy(target: ModelFiles, drafter: str, state: LoadState) -> TreePolicy:
    """The tree policy, with what it learned of this pair in earlier runs, if that may be used."""
    pair = [target.headers[0].fingerprint + state.variant, drafter]
    secret = user_secret() if state.config.speculation.learn else None
    store = TableStore() if secret is None else TableFile.for_pair(CacheKind.LEARNED.folder, pair, secret)
    return tree_policy(state.config.speculation.tree, store)


def tree_limits(plan: Plan, policy: TreePolicy) -> TreeLimits:
    speculation = plan.config.speculation
    return policy.clamp(usual_limits(max_nodes(plan)), speculation.tree_depth, speculation.tree_width)


def open_drafter(target: Target, limits: TreeLimits, plan: Plan, state: LoadState) -> Drafter:
    """The drafter: a model, prompt lookup, both, or none.

    Raises:
        UsageError: the files to draft from cannot be read.
    """
    files = plan.drafter
    if files is not None:
        kind = DRAFTER_KINDS[state.config.speculation.kind or "merged"]
        proposers = kind.new_proposers() + file_sources(target, state)
        return _open_model_drafter(files, target.model.vocabulary, limits, proposers, plan, state)
    if state.config.speculation.draft == "auto":
        state.notes.append(
            "No drafter for this target; drafting from the text itself. 'edgespec draft make' makes one."
        )
    proposers = DRAFTER_KINDS[drafter_name(None, state)].new_proposers() + file_sources(target, state)
    return ProposingDrafter(proposers) if proposers else NoDrafter()


def file_sources(target: Target, state: LoadState) -> list[Proposer]:
    """The files that drafts are to come from; raises as `folder_index.open_corpus`."""
    source = state.config.speculation.draft_from
    if source is None:
        return []
    from edgespec.drafters.folder_index import open_corpus

    key = read_header(target.model.path).fingerprint
    corpus, notes = open_corpus(Path(source), target.model.vocabulary, key, state.on_progress)
    state.notes += notes
    return [FileSource(corpus)]


def _open_model_drafter(
    files: ModelFiles,
    vocabulary: Vocabulary,
    limits: TreeLimits,
    proposers: Sequence[Proposer],
    plan: Plan,
    state: LoadState,
) -> Drafter:
    path = files.paths[0]
    model = state.drafter or open_drafting_model(files, plan, state, devices=plan.on_cards.drafter)
    differ = differs(vocabulary, model.vocabulary)
    window = WHOLE if model.keeps_recurrent_state else draft_window(plan.config, files)
    if window == WHOLE and plan.config.speculation.draft_window:
        state.notes.append(f"{path.name} has layers with a running state: it reads whole texts.")
    context = state.register(
        Context(
            model,
            n_cells=plan.context.drafter_cells or plan.context.n_cells,
            n_rows=plan.needs.drafter_rows,
            n_outputs=limits.width,
            n_sequences=1 if model.keeps_recurrent_state else plan.context.drafter_sequences or 1,
            n_threads=state.n_threads,
            abort=state.abort,
        )
    )
    translation = None
    if differ:
        from edgespec.drafters.translation import Translation

        translation = Translation(vocabulary, model.vocabulary)
        state.notes.append(
            f"The vocabularies of {path.name} and the target differ ({differ}): it drafts the "
            f"{translation.n_shared:,} tokens that both have."
        )
        if not model.keeps_recurrent_state:
            window = _within(window, context.n_cells - 2 * limits.budget)
    from edgespec.drafters.model import ModelDrafter

    max_rows = max(plan.context.drafter_outputs or context.n_outputs, limits.width)
    return ModelDrafter(
        model,
        context,
        vocabulary.n_tokens,
        proposers,
        window,
        translation=translation,
        max_rows=max_rows,
    )


def _within(window: DraftWindow, cells: int) -> DraftWindow:
    """The window, or one that fits into the cells: a text may have more tokens than the target's."""
    if window.most <= cells:
        return window
    first = min(window.first, cells // 4)
    return DraftWindow(cells - first, first)


def pair_costs(
    target: Target, drafter: Drafter, limits: TreeLimits, keys: ProfileKeys, state: LoadState
) -> RoundCosts | None:
    """Return the cost of trees of each size; None where their size is fixed, or their cost is better learned.

    What experts a pass reads depends on its text, and on what is in memory by then. So nothing that is
    measured beforehand says what it costs.
    """
    if state.config.speculation.tree_budget is not None or isinstance(drafter, NoDrafter):
        return None
    if target.model.weights.expert_use is not None:
        return None
    try:
        return initial_costs(
            target,
            drafter,
            limits.width,
            keys,
            state.on_progress,
            state.store,
            notes=state.notes,
            first_layers=state.first_layers if target.rule == ANY_ROWS else None,
        )
    except DecodeAborted:
        raise KeyboardInterrupt from None


def open_head(
    head: Head, files: ModelFiles, target: Target, shown: HiddenStateSource, plan: Plan, state: LoadState
) -> HeadDrafter | AssistantDrafter:
    """The head as a drafter, which the target shows its hidden states from now on.

    Raises:
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
