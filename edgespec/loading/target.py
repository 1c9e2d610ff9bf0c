"""Opening the target: its weights, its context, its chat template, and the rules of exact decoding."""

from __future__ import annotations

from platformdirs import user_cache_path

from edgespec.engine.target import Target
from edgespec.errors import BackendError
from edgespec.files.state import FileState
from edgespec.kernels.layouts import own_in_use
from edgespec.loading.adapters import refuse_streaming
from edgespec.loading.heads import require_hidden_states
from edgespec.loading.memory import MemoryDecision
from edgespec.loading.models import open_model
from edgespec.loading.state import LoadState
from edgespec.loading.workers import borrow_layers
from edgespec.machine.cores import thread_counts
from edgespec.measure.threads import choose_threads, known_threads
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.cache.identity import cache_identity
from edgespec.models.llama.cache.state_cache import N_SEQUENCES
from edgespec.models.llama.first_layers import FirstLayers
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.prefill_chunks import PrefillChunks, outcomes_path
from edgespec.models.llama.row_rule import (
    ANY_ROWS,
    FREE,
    FREE_SPARING,
    SPARING,
    THOROUGH,
    RowRule,
    RowRuleStore,
)
from edgespec.models.llama.runtime.abort import DecodeAborted
from edgespec.models.llama.runtime.adapters import load_adapter
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.residency import Residency
from edgespec.models.llama.state_trees import ROWS, Branching, BranchingStore
from edgespec.models.text.template import ChatTemplate
from edgespec.offload.attention import keep_row_attention
from edgespec.offload.experts.switch import UnknownRouting
from edgespec.offload.paging import try_paging
from edgespec.offload.planning.stream_plan import open_streamed_model
from edgespec.offload.store_reader import DamagedPack


def open_target(
    files: ModelFiles, memory: MemoryDecision, state: LoadState, tap: LayerTap | None = None
) -> tuple[Target, ChatTemplate | None]:
    """The target, ready to verify trees, and the process that renders its chat template.

    Args:
        tap: copies hidden states for a draft head.

    Raises:
        BackendError: exact decoding was asked for, and is not possible with this model here.
        UsageError: there are LoRA adapters, and not all weights are in memory; or exact decoding was asked
            for, with larger trees than it allows here.
        ModelFileError, MemoryLimitError, StreamError: its weights cannot be loaded.
    """
    header = files.headers[0]
    model, context = _open_context(files, memory, state, tap)
    branching = _try_branches(context, header.fingerprint, memory, state)
    if tap is not None:
        require_hidden_states(model, context, tap)
    exact = _decodes_exactly(context, branching, memory, state)
    template = _open_template(model, state)
    if state.adapters:
        context.adapt([(load_adapter(model, a.header.path), a.scale) for a in state.adapters])
    if exact:
        if model.weights.streamed_bytes and model.weights.expert_use is None:
            state.first_layers = FirstLayers(context, files)
        rule = _row_rule(context, header.fingerprint, memory, state)
    else:
        rule = _free_rule(context, header.fingerprint, memory, state)
    target = Target(model, context, rule)
    target.identity = cache_identity(
        header,
        model,
        context=state.cells_alone,
        rule=target.rule,
        kernels=memory.kernels,
        kv=state.config.model.kv,
        **({"lora": _adapter_states(state)} if state.adapters else {}),
        **({"layers": memory.spread.key} if memory.spread is not None else {}),
    )
    if memory.spread is None:
        _allow_long_chunks(target, header.fingerprint)
    _choose_threads(target, header.fingerprint, memory, state)
    return target, template


def _open_context(
    files: ModelFiles, memory: MemoryDecision, state: LoadState, tap: LayerTap | None
) -> tuple[Model, Context]:
    """The target's weights and its context; whole layers are streamed where single experts cannot be."""

    def open_for(model: Model) -> Context:
        return state.keep(
            Context(
                model,
                n_cells=state.n_cells,
                n_rows=max(memory.needs.rows, ROWS) if branching(model) else memory.needs.rows,
                n_outputs=max(state.n_nodes, ROWS) if branching(model) else state.n_nodes,
                n_sequences=N_SEQUENCES if branching(model) else state.n_sequences(model),
                n_threads=state.n_threads,
                abort=state.abort,
                kv=state.config.model.kv,
                observers=[] if tap is None else [tap],
                branching=branching(model),
            )
        )

    def branching(model: Model) -> bool:
        return model.keeps_recurrent_state and _alone(memory, state)

    model = _open_weights(files, memory, state)
    context = open_for(model)
    if model.weights.expert_use is None or _routes_as_expected(context):
        return model, context
    model.close()
    if state.crew is not None:  # the workers are let go with the weights
        raise BackendError(
            f"How {files.paths[0].name} chooses experts is not known, so they cannot be streamed one by one.",
            "Use --experts never, which streams whole layers.",
        )
    memory.plan.stream_again(experts="never")
    state.notes.append("How this model chooses experts is not known: whole layers are streamed.")
    model = _open_weights(files, memory, state)
    return model, open_for(model)


def _routes_as_expected(context: Context) -> bool:
    """Whether the experts that a pass needs are known before it needs them; found by trying one."""
    try:
        context.decode(Batch.run([0], 0, n_sequences=1, logits="last"))
    except UnknownRouting:
        return False
    finally:
        context.clear()
    return True


def _open_weights(files: ModelFiles, memory: MemoryDecision, state: LoadState) -> Model:
    path, plan = files.paths[0], memory.plan
    if state.adapters and (plan.stream is not None or plan.paged):
        raise refuse_streaming()
    devices: DeviceLayers = memory.on_cards.target
    beside: Residency | None = None
    if state.crew is not None and memory.spread is not None:
        if memory.spread.elsewhere:
            devices, beside = borrow_layers(memory.spread, state.crew, state)
        else:
            state.crew.close()  # a worker serves one program at a time
    if plan.stream is None:
        if plan.paged and beside is None:
            beside = try_paging(files)
        # Rearranged weights are a copy in memory, which the system cannot page out.
        return open_model(
            path, state, memory_map=plan.memory_map, repack=not plan.paged, weights=beside, devices=devices
        )
    try:
        model = open_streamed_model(path, plan.stream, devices, state.on_progress, beside)
    except DamagedPack:  # the pack has been removed, so this makes a new one
        if beside is not None:  # the workers are let go with the weights
            raise
        model = open_streamed_model(path, plan.stream_again(), devices, state.on_progress)
    state.keep(model)
    state.notes += plan.stream.notes
    return model


def _try_branches(
    context: Context, fingerprint: str, memory: MemoryDecision, state: LoadState
) -> Branching | None:
    """Whether the model's running states can branch; None if it keeps none.

    Where they cannot, the context does without.
    """
    if not context.model.keeps_recurrent_state:
        return None
    outcome = Branching.WRONG
    if context.branches:
        state.on_progress("Trying branches of running states (once a model)", 0.0)
        held = f"{memory.kernels}{state.variant}{memory.places}"
        outcome = BranchingStore(user_cache_path("edgespec") / "rows").get(fingerprint, held, context)
    context.branches = outcome is not Branching.WRONG
    if not context.branches:
        state.notes.append(
            "The target keeps a running state, which cannot branch here: drafting chains, not trees."
        )
    return outcome


def _decodes_exactly(
    context: Context, branching: Branching | None, memory: MemoryDecision, state: LoadState
) -> bool:
    """Whether decoding is exact: as asked for, or else where the weights are streamed."""
    model = context.model
    # A streamed pass takes the same time with the rows that exactness adds. But where only the experts that
    # rows need are read, a pass over few rows takes about as long as its arithmetic.
    streamed = memory.plan.stream is not None and model.weights.expert_use is None
    asked = state.config.speculation.exact
    exact = streamed if asked is None else asked
    if exact and branching not in (None, Branching.SAME):
        if asked:
            why = "whose branches round differently" if context.branches else "which cannot branch"
            raise BackendError(
                f"'{model.path.name}' keeps a running state, {why} here, so decoding cannot be exact.",
                "Use --no-exact.",
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
    template = state.keep(ChatTemplate(source, bos, eos))
    template.start()  # its process starts while the context is set up
    return template


def _free_rule(
    context: Context, fingerprint: str, memory: MemoryDecision, state: LoadState
) -> RowRule | None:
    """The rule that adds no rows, if it holds for a model in memory and exact decoding was not declined."""
    plan = memory.plan
    in_memory = plan.stream is None and not plan.paged and _alone(memory, state)
    chains = context.model.keeps_recurrent_state and not context.branches
    if state.config.speculation.exact is not None or not in_memory or chains:
        return None
    if not own_in_use():
        return None
    held = f"{memory.kernels}{state.variant}{memory.places}"
    return RowRuleStore(user_cache_path("edgespec") / "rows").get(fingerprint, held, context, FREE)


def _alone(memory: MemoryDecision, state: LoadState) -> bool:
    """Whether this machine's processor computes all layers: who computes elsewhere cannot be watched."""
    return state.crew is None and memory.spread is None and memory.on_cards.target == ON_PROCESSOR


def _row_rule(context: Context, fingerprint: str, memory: MemoryDecision, state: LoadState) -> RowRule | None:
    exact = state.config.speculation.exact
    state.on_progress("Finding the rule for exact decoding (once a model)", 0.0)
    held = f"{memory.kernels}{state.variant}{memory.places}"
    slow = memory.plan.stream is not None or state.crew is not None
    rules = RowRuleStore(user_cache_path("edgespec") / "rows")
    searches = (FREE_SPARING, SPARING) if slow else (FREE, THOROUGH)
    for search in searches if _alone(memory, state) else searches[1:]:
        rule = rules.get(fingerprint, held, context, search, state.first_layers)
        if rule is not None:
            state.config.speculation.require_exact_budget(rule.maximum)
            return rule
    if exact is not None:
        raise BackendError(
            "No row rule gives identical results with this model on this machine, so decoding cannot "
            "be exact here.",
            "Use --no-exact: the text may then differ at near-ties between tokens.",
        )
    state.notes.append("No row rule holds for this model here, so the text is not bit-exact.")
    return None


def _allow_long_chunks(target: Target, fingerprint: str) -> None:
    """Let a target read prompts in long chunks, if these turn out to be exact.

    Trying costs a streamed target little. Where no number of rows changes a bit, nothing need be tried.
    """
    if target.rule is None or target.rule == ANY_ROWS:
        return
    if target.model.weights.streamed_bytes and keep_row_attention(target.context):
        path = outcomes_path(user_cache_path("edgespec") / "rows", fingerprint, target.identity)
        target.pieces = PrefillChunks(target.rule, target.context.n_rows, path)


def _choose_threads(target: Target, fingerprint: str, memory: MemoryDecision, state: LoadState) -> None:
    """Compute with the fastest number of threads, which is measured where trees are sized too."""
    speculation = state.config.speculation
    if state.config.devices.threads is not None or len(thread_counts()) < 2:
        return
    try:
        # Random text would fill the memory for experts with those that no real text needs.
        # What passes take on devices and other machines says nothing of the processor.
        tries = target.model.weights.expert_use is None and memory.spread is None
        if tries and speculation.drafts and speculation.tree_budget is None:
            state.n_threads = choose_threads(target, fingerprint)
        else:
            state.n_threads = known_threads(fingerprint)
            target.context.set_threads(state.n_threads)
    except DecodeAborted:
        raise KeyboardInterrupt from None
