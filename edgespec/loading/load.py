"""`edgespec.load`: from names and options to an engine that is ready."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.arguments import check_type
from edgespec.config import Config
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
from edgespec.loading.arguments import LoadArguments, checked_config, takes_options
from edgespec.loading.devices.finding import open_cards
from edgespec.loading.drafter import drafter_name, open_drafter, open_policy, pair_costs, tree_limits
from edgespec.loading.files import find_drafter, read_model
from edgespec.loading.heads import head_tap, note_further_layers, open_head
from edgespec.loading.memory import MemoryDecision, decide_memory
from edgespec.loading.state import LoadState
from edgespec.loading.target import open_target
from edgespec.loading.texts import TextPlan, plan_texts
from edgespec.loading.tree_sizes import usual_nodes
from edgespec.loading.workers import connect
from edgespec.models.gguf.footprint import require_cache_type
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

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_options
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    on_progress: Progress | None = None,
    **options: Unpack[LoadArguments],
) -> Engine:
    """Load a target and its drafter.

    Args:
        {options}
        on_progress: called with what is being done and the fraction done.

    Raises:
        EdgeSpecError: by kind: UsageError, ModelFileError, HubError, MemoryLimitError, BackendError.
    """
    check_type("on_progress", on_progress, Progress | None)
    return open_engine(checked_config({"model": model, **options}), on_progress)


def open_engine(config: Config, on_progress: Progress | None = None) -> Engine:
    """Load the target and the drafter of a configuration; raises as `load`."""
    path = catalog.find(config.model.name, on_progress)
    state = LoadState(config, on_progress or no_progress)
    with state.undone_on_failure():
        engine = _open_engine(path, state)
    if config.memory.prompt_cache:
        _keep_prompts(engine, CheckedFiles(Kept.PROMPTS.folder, config.memory.prompt_cache_size))
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
    config = state.config
    target_files = read_model(path)
    require_cache_type(config.model.kv, target_files.headers[0])
    state.adapters = read_adapters(config.model.lora, target_files.headers[0])
    for adapter in state.adapters:
        require_loadable([adapter.header], target_files.headers[0])
    _try_kernels(state)
    _connect_workers(target_files, state)
    state.cards = open_cards(target_files, state.card_request)
    drafter_files = find_drafter(target_files, state)
    state.usual_nodes = usual_nodes(target_files, state)
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
        Encoder(target.model.vocabulary, template, config.model.context),
        state.abort,
        context=config.model.context,
        tree_budget=config.speculation.tree_budget,
        limits=limits,
        policy=policy,
        costs=pair_costs(target, drafter, limits, keys, state),
        keys=keys,
        learn=config.speculation.learn,
        notes=state.notes,
        warnings=state.warnings + memory.plan.warnings,
        load_s=time.perf_counter() - start,
        memory=memory.use(target.model, state.cards),
        exact=bool(config.speculation.exact),
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
    state.more_cells = texts.more_cells
    try:
        memory = decide_memory(target, drafter, state)
    except MemoryLimitError:
        if not texts.more_cells:
            raise
        state.more_cells = 0
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
        state.config.speculation.require_exact_budget(MOST_PADDED_ROWS)


def _connect_workers(files: ModelFiles, state: LoadState) -> None:
    """Connect to the workers that were named; raises as `workers.connect`."""
    if state.config.devices.workers:
        state.on_progress("Connecting to workers", 0.0)
    crew = connect(files, state)
    state.crew = None if crew is None else state.keep(crew)
