"""`edgespec.load`: from names and options to an engine that is ready."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.arguments import checks_arguments
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target
from edgespec.errors import MemoryLimitError
from edgespec.files.checked import CheckedFiles
from edgespec.files.kept import Kept
from edgespec.kernels.layouts import own_in_use
from edgespec.kernels.native.build import COMMAND, build_once, library_path
from edgespec.kernels.report_store import ensure_report, report_notes, stored_report
from edgespec.kernels.setting import own_allowed
from edgespec.loading.adapters import read_adapters
from edgespec.loading.devices.finding import ALL, open_cards
from edgespec.loading.drafter import drafter_name, open_drafter, open_policy, pair_costs, tree_limits
from edgespec.loading.files import find_drafter, read_model
from edgespec.loading.heads import head_tap, note_further_layers, open_head
from edgespec.loading.memory import MemoryDecision, decide_memory
from edgespec.loading.options import DEFAULT_KV, LoadOptions
from edgespec.loading.state import LoadState
from edgespec.loading.target import open_target
from edgespec.loading.texts import TextPlan, plan_texts
from edgespec.loading.tree_sizes import usual_nodes
from edgespec.loading.workers import connect
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.llama.cache.states import StateStore
from edgespec.models.llama.heads.tap import LayerTap
from edgespec.models.llama.row_rule import MOST_PADDED_ROWS
from edgespec.models.llama.runtime.vetting import require_loadable
from edgespec.models.text.encoding import Encoder
from edgespec.models.text.template import ChatTemplate
from edgespec.profiles.store import Keys
from edgespec.progress import Progress, no_progress
from edgespec.speculation.drafters.base import Drafter
from edgespec.units import parse_size

DEFAULT_CONTEXT = 4096
DEFAULT_PROMPT_CACHE = "8GiB"


@checks_arguments
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] = "auto",
    drafter: str | None = None,
    context: int = DEFAULT_CONTEXT,
    threads: int | None = None,
    memory: int | str | None = None,
    tree: str = "calibrated",
    tree_budget: int | None = None,
    tree_depth: int | None = None,
    tree_width: int | None = None,
    exact: bool | None = None,
    gpu_layers: int | str = "auto",
    device: str | Sequence[str] = (),
    draft_device: str = "auto",
    offload: str = "auto",
    pack: str = "auto",
    slots: int | None = None,
    kv: str = DEFAULT_KV,
    lora: Sequence[str] = (),
    parallel: int | str | None = None,
    text_tokens: int | None = None,
    experts: str = "auto",
    prompt_cache: bool = False,
    prompt_cache_size: int | str = DEFAULT_PROMPT_CACHE,
    draft_from: str | os.PathLike[str] | None = None,
    learn: bool = True,
    workers: Sequence[str] = (),
    leave_out_missing: bool = False,
    on_progress: Progress | None = None,
) -> Engine:
    """Load a target and its drafter.

    Args:
        model: path of a GGUF file, a catalog name, or org/repo[:quant] on the Hub, which is downloaded if
            necessary; None is the default model.
        draft: path or name of a small model, preferably with the same vocabulary, or of an EAGLE-3 head that
            was made for the target; "lookup" drafts from the text itself; "auto" takes the best drafter on
            this machine (registered, of the same family, made, or else the text itself); "none" decodes
            without drafting.
        drafter: the kind: "model" or "lookup" alone, or "merged"; None merges what is available.
        context: maximum tokens, prompt plus answer.
        threads: CPU threads; None takes one for each physical core that this process may use, or one for each
            hardware thread if that was measured to be faster.
        memory: bytes EdgeSpec may use, or a size such as "8GiB"; None means what is available.
        tree: the policy by which trees grow; see speculation.policies.
        tree_budget: most nodes per pass; None sizes trees by measured cost.
        tree_depth: most drafted tokens on a path; None leaves it to the policy and to measured cost.
        tree_width: most nodes that the drafter reads at a time; None as for the depth.
        exact: decode under a row rule, so that the text is bit-identical whatever the drafter and tree; None
            does so where it costs next to nothing. With True, verification rules by which the drafter
            influences the text are refused.
        gpu_layers: layers for graphics cards: a number, "all", or "auto", which gives them as many as makes
            passes faster by measurement; 0 leaves the cards alone. See docs/devices.md.
        device: names of the cards that may hold layers, such as "CUDA0"; none means all.
        draft_device: a card for the drafter; "auto" takes one where its steps are faster, "none" takes none.
        offload: "none" keeps all weights in memory, "stream" reads those that do not fit from disk in
            every pass, "mmap" lets the system page them, "auto" keeps or streams them.
        pack: whether streamed weights are rearranged for this CPU in a file of their own: "auto" if
            the disk has room for it, "always" or "never".
        slots: streamed layers in memory at a time; None lets the plan decide.
        kv: type of the target's cached keys and values: "f16", or "q8_0", which takes about half the memory
            and changes the text a little.
        lora: LoRA adapters of the target, as "FILE" or "FILE:SCALE". All weights must be in memory.
        parallel: how many texts are to be answered at once. The cache gets room for them, as far as the
            memory allows; "auto" finds the number that is worth most, from the memory and from what passes
            were measured to take. None leaves the cache as large as one text needs, and several share it.
        text_tokens: tokens of a usual text, prompt and answer together, where there are several; None assumes
            512. A single text may still have `context` tokens.
        experts: how a mixture of experts is streamed: "auto" reads the experts that a pass needs and does not
            find in memory, "never" reads whole layers.
        prompt_cache: save the states of prompts on disk, so that equal beginnings are read only once.
        prompt_cache_size: most bytes that states and answers take there, those of all models together, or a
            size such as "8GiB"; what was of no use for the longest time makes room.
        draft_from: a folder with text files, or a file, whose passages are proposed where the text goes on
            like one of them. An index of it is kept in the cache folder.
        learn: use what earlier runs learned about this pair of models, and keep what this one learns; see
            docs/how-to/privacy.md for what that is. False begins with nothing and keeps nothing.
        workers: "HOST:PORT" of machines that run 'edgespec worker' and hold the target's layers together with
            this one; see docs/devices.md. All weights must fit in these memories.
        leave_out_missing: go on without workers that do not answer; from disk, if none does.
        on_progress: called with what is being done and the fraction done.

    Raises:
        EdgeSpecError: by kind: UsageError, ModelFileError, HubError, MemoryLimitError, BackendError.
    """
    options = LoadOptions(
        draft=os.fspath(draft),
        kind=drafter,
        context=context,
        threads=threads,
        memory=parse_size(memory) if isinstance(memory, str) else memory,
        tree=tree,
        tree_budget=tree_budget,
        tree_depth=tree_depth,
        tree_width=tree_width,
        exact=exact,
        gpu_layers=ALL if gpu_layers == -1 else gpu_layers,
        device=(device,) if isinstance(device, str) else tuple(device),
        draft_device=draft_device,
        offload=offload,
        pack=pack,
        slots=slots,
        kv=kv,
        lora=tuple(lora),
        parallel=parallel,
        text_tokens=text_tokens,
        experts=experts,
        draft_from=None if draft_from is None else Path(draft_from),
        learn=learn,
        workers=tuple(workers),
        leave_out_missing=leave_out_missing,
    )
    options.check()
    limit = prompt_cache_size if isinstance(prompt_cache_size, int) else parse_size(prompt_cache_size)
    path = catalog.find(model, on_progress)
    state = LoadState(options, on_progress or no_progress)
    with state.undone_on_failure():
        engine = _open_engine(path, state)
    if prompt_cache:
        _keep_prompts(engine, CheckedFiles(Kept.PROMPTS.folder, limit))
    return engine


def _keep_prompts(engine: Engine, files: CheckedFiles) -> None:
    """Have the states of texts kept in files, those of the drafter too."""
    engine.prompt_files = files
    engine.target.stores.append(StateStore(files, repr(sorted(engine.target.identity.items()))))
    if isinstance(engine.drafter, ModelDrafter):
        engine.drafter.keep_prompts(files)


def _open_engine(path: Path, state: LoadState) -> Engine:
    """The steps of loading, in order."""
    start = time.perf_counter()
    options = state.options
    target_files = read_model(path)
    options.check_cache(target_files.headers[0])
    state.adapters = read_adapters(options.lora, target_files.headers[0])
    for adapter in state.adapters:
        require_loadable([adapter.header], target_files.headers[0])
    _try_kernels(state)
    _connect_workers(target_files, state)
    state.cards = open_cards(target_files, state.card_request)
    drafter_files = find_drafter(target_files, state)
    state.options = replace(state.options, usual_nodes=usual_nodes(target_files, state))
    texts = plan_texts(target_files, drafter_files, state)
    tap = head_tap(drafter_files)
    memory, target, template = _open_placed(texts, target_files, drafter_files, tap, state)

    drafted_by = drafter_name(drafter_files, state)
    policy = open_policy(target_files, drafted_by, state)
    experts = target.model.weights.expert_use is not None
    limits = tree_limits(drafter_files, policy, state, experts=experts)
    if drafter_files is not None and tap is not None:
        drafter: Drafter = open_head(drafter_files, target, tap, memory, state)
    else:
        drafter = open_drafter(drafter_files, target, limits, memory, state)
    note_further_layers(target_files, state)

    keys = Keys.of(
        target_files.headers[0].fingerprint,
        drafted_by,
        threads=target.context.n_threads,
        mode=f"{target.rule} {memory.kernels}{state.variant}",
        workers=memory.places if state.crew is None else f"{memory.places} {state.crew.identity}",
        drafter_device=memory.on_cards.drafter_name,
    )
    return Engine(
        target,
        drafter,
        Encoder(target.model.vocabulary, template, options.context),
        state.abort,
        context=options.context,
        tree_budget=options.tree_budget,
        limits=limits,
        policy=policy,
        costs=pair_costs(target, drafter, limits, keys, state),
        keys=keys,
        learn=options.learn,
        notes=state.notes,
        warnings=state.warnings + memory.plan.warnings,
        load_s=time.perf_counter() - start,
        memory=memory.use(target.model, state.cards),
        exact=bool(options.exact),
        texts=texts.texts,
    )


def _open_placed(
    texts: TextPlan,
    target_files: ModelFiles,
    drafter_files: ModelFiles | None,
    tap: LayerTap | None,
    state: LoadState,
) -> tuple[MemoryDecision, Target, ChatTemplate | None]:
    """The target, and where it is: with fewer layers on devices, if these turn out to have too little memory.

    What a device says is free may be gone a moment later, and drivers take some of it themselves.
    """
    while True:
        memory: MemoryDecision | None = None
        try:
            with state.undone_on_memory_limit():
                memory = _memory_for(texts, target_files, drafter_files, state)
                return memory, *open_target(target_files, memory, state, tap)
        except MemoryLimitError as error:
            if memory is None or not memory.on_cards.n_layers:
                raise
            state.most_on_devices = memory.on_cards.n_layers * 3 // 4
            state.warnings.append(
                f"The memory of a device ran out ({error.what.rstrip('.')}): trying again with "
                f"{state.most_on_devices} layers there."
            )


def _memory_for(
    texts: TextPlan, target: ModelFiles, drafter: ModelFiles | None, state: LoadState
) -> MemoryDecision:
    """The memory with cells for so many texts; or for a single one, if what was estimated does not fit."""
    alone = state.options
    state.options = replace(alone, more_cells=texts.more_cells)
    try:
        memory = decide_memory(target, drafter, state)
    except MemoryLimitError:
        if not texts.more_cells:
            raise
        state.options = alone
        return decide_memory(target, drafter, state)
    if texts.note:
        state.notes.append(texts.note)
    return memory


def _try_kernels(state: LoadState) -> None:
    """Make sure that the kernel layouts in use were tried on this processor.

    Raises:
        UsageError: exact decoding with large trees was asked for, which takes EdgeSpec's own kernels.
    """
    if own_allowed() and library_path() is None:
        state.on_progress("Compiling EdgeSpec's kernels (once)", 0.0)
        if problem := build_once():
            state.notes.append(
                f"llama.cpp's kernels are used, which are slower than EdgeSpec's own: {problem}. "
                f"To try again: {COMMAND}"
            )
    if stored_report() is None:
        state.on_progress("Trying the processor's kernels (once)", 0.0)
    state.notes += report_notes(ensure_report())
    if not own_in_use():
        state.options.require_exact_budget(MOST_PADDED_ROWS)


def _connect_workers(files: ModelFiles, state: LoadState) -> None:
    """Connect to the workers that were named; raises as `workers.connect`."""
    if state.options.workers:
        state.on_progress("Connecting to workers", 0.0)
    crew = connect(files, state)
    state.crew = None if crew is None else state.keep(crew)
