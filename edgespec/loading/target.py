"""Opening the target: its weights, its context, its chat template, and the rules of exact decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from edgespec.base.option import named
from edgespec.engine.target import Target
from edgespec.errors import BackendError
from edgespec.files.state import FileState
from edgespec.files.user_folders import cache_folder
from edgespec.kernels.ggml.buffer_types import pinned_memory_name
from edgespec.llama.cache.state_cache import N_SEQUENCES
from edgespec.llama.cache.states import cache_identity
from edgespec.llama.first_layers import FirstLayers
from edgespec.llama.prefill_chunks import PrefillChunks, outcomes_path
from edgespec.llama.row_rule import ANY_ROWS, RowRule, RowRuleStore
from edgespec.llama.runtime.abort import DecodeAborted
from edgespec.llama.runtime.backend import LogLines, log_lines
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.device_layers import DeviceLayers
from edgespec.llama.runtime.model import Model, load_adapter
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.llama.state_trees import ROWS, BranchExactness, BranchingStore
from edgespec.loading.models import open_model
from edgespec.loading.state import LoadState
from edgespec.machine.cores import thread_counts
from edgespec.measure.threads import choose_threads, known_threads
from edgespec.models.gguf.footprint import cells_for
from edgespec.offload.packing.index import packs_folder
from edgespec.planning.adapters import refuse_streaming
from edgespec.planning.devices.finding import UNPINNED
from edgespec.planning.host_products import host_layers
from edgespec.planning.pack_folders import pack_folders
from edgespec.planning.plan import Plan, rule_searches
from edgespec.text.template import ChatTemplate

if TYPE_CHECKING:
    from edgespec.heads.families import HiddenStateSource


def open_target(
    plan: Plan,
    state: LoadState,
    shown: HiddenStateSource | None = None,
    while_loading: Callable[[Plan], None] = lambda _plan: None,
) -> tuple[Plan, Target, ChatTemplate | None]:
    """The target, ready to verify trees, and the process that renders its chat template.

    The plan is returned as it was carried out: the disk may have had no room for a packed file.

    Args:
        shown: the source of the hidden states that a draft head reads.
        while_loading: called while weights that stay in memory are read, if layers are streamed.

    Raises:
        BackendError: the model does not write token after token; or exact decoding was asked for, and is not
            possible with this model here.
        UsageError: there are LoRA adapters, and not all weights are in memory; or exact decoding was asked
            for, with larger trees than it allows here.
    """
    plan, model, context = _open_context(plan, state, shown, while_loading)
    context.clear()  # refuses a model that keeps no cache of a text
    files, header = plan.target, plan.target.headers[0]
    branching = _try_branches(context, header.fingerprint, plan, state)
    if shown is not None:
        shown.require_rows(context)
    exact = _decodes_exactly(context, branching, plan)
    template = _open_template(model, state)
    if state.adapters:
        context.adapt([(load_adapter(model, a.header.path), a.scale) for a in state.adapters])
    if exact and model.weights.streamed_bytes and model.weights.expert_use is None:
        state.first_layers = FirstLayers(context, files)
    chains = model.keeps_recurrent_state and not context.branches
    rule = None
    if exact or not (plan.exact or chains):
        rule = _row_rule(context, header.fingerprint, plan, state)
    target = Target(model, context, rule)
    target.identity = cache_identity(
        header,
        model,
        context=cells_for(plan.config.model.context, plan.config.speculation.tree_budget or 0),
        rule=target.rule,
        kernels=plan.kernels,
        kv=state.config.model.kv,
        **({"lora": _adapter_states(state)} if state.adapters else {}),
        **({"layers": plan.places} if plan.assignment is not None else {}),
    )
    if plan.assignment is None:
        _allow_long_chunks(target, header.fingerprint)
    _choose_threads(target, header.fingerprint, plan, state)
    return plan, target, template


def _open_context(
    plan: Plan, state: LoadState, shown: HiddenStateSource | None, while_loading: Callable[[Plan], None]
) -> tuple[Plan, Model, Context]:
    """The target's weights and its context; whole layers are streamed where single experts cannot be."""

    sizes = plan.context

    def open_for(model: Model) -> Context:
        context = state.register(
            Context(
                model,
                n_cells=sizes.n_cells,
                n_rows=max(plan.needs.rows, ROWS) if branching(model) else plan.needs.rows,
                n_outputs=max(sizes.n_outputs, ROWS) if branching(model) else sizes.n_outputs,
                n_sequences=N_SEQUENCES if branching(model) else sizes.sequences(model),
                n_threads=state.n_threads,
                abort=state.abort,
                kv=state.config.model.kv,
                observers=() if shown is None else shown.observers,
                branching=branching(model),
            )
        )
        if shown is not None:
            shown.attach(context)
        return context

    def branching(model: Model) -> bool:
        return model.keeps_recurrent_state and plan.alone

    plan, model = _open_weights(plan, state, while_loading)
    context = open_for(model)
    layout = plan.memory.layout
    if layout is None or model.weights.expert_use is None or _routes_as_expected(context):
        return plan, model, context
    model.close()
    if state.workers is not None:  # the workers are let go with the weights
        raise BackendError(
            f"{plan.target.paths[0].name} routes experts in an unknown way: they cannot be streamed singly.",
            f"Use {named('experts', 'never')}, which streams whole layers.",
        )
    state.notes.append("Unknown expert routing: streaming whole layers instead of single experts.")
    plan, model = _open_weights(plan.with_layout(layout.again(experts="never")), state)
    return plan, model, open_for(model)


def _routes_as_expected(context: Context) -> bool:
    """True if the experts that a pass needs are known before it needs them; found by trying one."""
    from edgespec.offload.experts.switch import UnknownRouting

    try:
        context.decode(TokenBatch.run([0], 0, n_sequences=1, logits="last"))
    except UnknownRouting:
        return False
    finally:
        context.clear()
    return True


def _are_pinned(devices: DeviceLayers, log: LogLines) -> bool:
    """True if llama.cpp's log shows weights in pinned memory, or no device has such memory."""
    names = {pinned_memory_name(device) for device in devices.devices} - {""}
    sizes = [line for line in log.info if "model buffer size" in line]
    return not names or any(name in line for name in names for line in sizes)


def _open_weights(
    plan: Plan, state: LoadState, while_loading: Callable[[Plan], None] = lambda _plan: None
) -> tuple[Plan, Model]:
    """The target's weights, and the plan as it was carried out."""
    files, memory = plan.target, plan.memory
    plan.on_cards.require_room()
    if state.adapters and not memory.in_memory:
        raise refuse_streaming()
    devices: DeviceLayers = plan.on_cards.target
    sent_from = None if plan.products is None else plan.products.sent_from
    beside: WeightStore | None = None
    if state.workers is not None and plan.assignment is not None:
        if plan.assignment.elsewhere:
            from edgespec.loading.workers import borrow_layers

            devices, beside = borrow_layers(plan.assignment, state.workers, state)
        else:
            state.workers.close()  # a worker serves one program at a time
    if memory.layout is None:
        if memory.paged and beside is None:
            from edgespec.offload.paging import try_paging

            beside = try_paging(files)
        if plan.rereads and plan.assignment is not None:
            from edgespec.offload.reread import RereadWeights

            layers = host_layers(files, plan.assignment)
            beside = RereadWeights(files, layers, devices.devices[0])
        # Rearranged weights are a copy in memory, which the system cannot page out.
        with log_lines() as log:
            model = open_model(
                files.paths[0],
                state,
                memory_map=memory.memory_map,
                repack=plan.rearranges,
                weights=beside,
                devices=devices,
                sent_from=sent_from,
                mtp=plan.drafts_for_itself,
            )
        pinned = not model.weights.unpinned if plan.rereads else _are_pinned(devices, log)
        if plan.sends and not pinned:
            state.notes.append(UNPINNED)
        return plan, model
    from edgespec.loading.streamed_model import open_streamed_model, prepare_stream
    from edgespec.offload.store_reader import DamagedPack

    opened = partial(
        open_streamed_model,
        files.paths[0],
        mtp=plan.drafts_for_itself,
        sent_from=sent_from,
        while_loading=partial(while_loading, plan),
    )
    prepare = partial(prepare_stream, files, memory.layout, memory.pack, packs_folder(), state.on_progress)
    prepare = partial(prepare, spread=pack_folders(state.config, state.store, state.on_progress))
    stream = prepare()
    try:
        model = opened(stream, devices, state.on_progress, beside)
    except DamagedPack:  # the pack has been removed, so this makes a new one
        if beside is not None:  # the workers are let go with the weights
            raise
        stream = prepare()
        model = opened(stream, devices, state.on_progress)
    state.notes += stream.notes
    if model.weights.unpinned:
        state.notes.append(UNPINNED)
    return plan.with_layout(stream.layout), state.register(model)


def _try_branches(context: Context, fingerprint: str, plan: Plan, state: LoadState) -> BranchExactness | None:
    """Try the branching of the model's running states; None if it keeps none.

    Where they cannot, the context does without.
    """
    if not context.model.keeps_recurrent_state:
        return None
    outcome = BranchExactness.WRONG
    if context.branches:
        state.on_progress("Trying branches of running states (once per model)", 0.0)
        held = f"{plan.kernels}{state.variant}{plan.places}"
        outcome = BranchingStore(cache_folder() / "rows").get(fingerprint, held, context)
    context.branches = outcome is not BranchExactness.WRONG
    if not context.branches:
        state.notes.append(
            "The target keeps a running state, which cannot branch here: drafting chains, not trees."
        )
    return outcome


def _decodes_exactly(context: Context, branching: BranchExactness | None, plan: Plan) -> bool:
    """True if decoding is exact as planned, which takes branches that round like the text."""
    model, exact = context.model, plan.exact
    if exact and branching not in (None, BranchExactness.SAME):
        if plan.config.speculation.exact:
            why = "whose branches round differently" if context.branches else "which cannot branch"
            raise BackendError(
                f"'{model.path.name}' keeps a running state, {why} here, so decoding cannot be exact.",
                f"Use {named('exact', False)}.",
            )
        return False
    return exact


def _adapter_states(state: LoadState) -> str:
    return ", ".join(f"{FileState.of(a.header.path)} {a.scale:g}" for a in state.adapters)


def _open_template(model: Model, state: LoadState) -> ChatTemplate | None:
    source = model.chat_template
    if source is None:
        return None
    vocabulary = model.vocabulary
    bos, eos = (vocabulary.text(t).decode("utf-8", "replace") for t in (vocabulary.bos, vocabulary.eos))
    template = state.register(ChatTemplate(source, bos, eos, tools_source=model.tools_template))
    template.start()  # its process starts while the context is set up
    return template


def _row_rule(context: Context, fingerprint: str, plan: Plan, state: LoadState) -> RowRule | None:
    """The first rule that holds of those that are tried under the plan; None if none does."""
    held = f"{plan.kernels}{state.variant}{plan.places}"
    rules = RowRuleStore(cache_folder() / "rows")
    if plan.exact:
        state.on_progress("Finding the rule for exact decoding (once per model)", 0.0)
    for search in rule_searches(plan):
        rule = rules.get(fingerprint, held, context, search, state.first_layers)
        if rule is not None:
            state.config.speculation.require_exact_budget(rule.maximum)
            return rule
    if not plan.exact:
        return None
    if state.config.speculation.exact is not None:
        raise BackendError(
            "No row rule gives identical results with this model on this machine, so decoding cannot "
            "be exact here.",
            f"Use {named('exact', False)}: the text may then differ at near-ties between tokens.",
        )
    state.notes.append("No row rule works for this model here, so the text is not bit-exact.")
    return None


def _allow_long_chunks(target: Target, fingerprint: str) -> None:
    """Allow a target long prefill chunks, if these turn out to be exact.

    Trying costs a streamed target little. Where no number of rows changes a bit, nothing need be tried.
    """
    if target.rule is None or target.rule == ANY_ROWS:
        return
    if not target.model.weights.streamed_bytes:
        return
    from edgespec.offload.attention import keep_row_attention

    if keep_row_attention(target.context):
        path = outcomes_path(cache_folder() / "rows", fingerprint, target.identity)
        target.pieces = PrefillChunks(target.rule, target.context.n_rows, path)


def _choose_threads(target: Target, fingerprint: str, plan: Plan, state: LoadState) -> None:
    """Compute with the fastest number of threads, which is measured where trees are sized too."""
    if state.config.devices.threads is not None or len(thread_counts()) < 2:
        return
    try:
        if plan.times_threads:
            state.n_threads = choose_threads(target, fingerprint, state.store)
        else:
            state.n_threads = known_threads(fingerprint, state.store)
            target.context.set_threads(state.n_threads)
    except DecodeAborted:
        raise KeyboardInterrupt from None
