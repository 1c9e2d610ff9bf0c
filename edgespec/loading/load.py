"""`edgespec.load`: from names and options to an engine that is ready."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edgespec.base.progress import Progress, no_progress
from edgespec.config import AUTO, NONE, Config, ModelConfig
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.drafting import Speculator
from edgespec.engine.engine import Engine
from edgespec.engine.sequence_maker import Loaded
from edgespec.engine.target import Target
from edgespec.errors import DeviceLostError, DeviceMemoryError, MemoryLimitError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.checked import CheckedFiles
from edgespec.heads.families import head_of, hidden_states
from edgespec.images.projector import doubt_about, find_projector, named_projector
from edgespec.images.reader import ImageReader
from edgespec.kernels.layouts import own_in_use
from edgespec.kernels.native.build import build_once, needs_build
from edgespec.kernels.report_store import ensure_report, own_fault, report_notes, stored_report
from edgespec.kernels.setting import OWN, cost_of_missing, own_allowed
from edgespec.llama.build import current_build
from edgespec.llama.row_rule import MAX_PADDED_ROWS
from edgespec.llama.runtime.device_failures import lost_devices, shortages
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.loading.arguments import LoadArguments, checked_config, takes_options
from edgespec.loading.drafter import (
    drafter_name,
    open_drafter,
    open_head,
    open_policy,
    pair_costs,
    tree_limits,
)
from edgespec.loading.models import open_drafting_model
from edgespec.loading.state import LoadState
from edgespec.loading.target import open_target
from edgespec.measure.threads import planned_threads
from edgespec.models.gguf.footprint import require_cache_type
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.planning.adapters import read_adapters
from edgespec.planning.decision import Decision, decide
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.drafter import find_drafter
from edgespec.planning.files import read_model, reserved_projector
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileKeys
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.sources.answers import Answers
from edgespec.text.encoding import Encoder
from edgespec.text.template import ChatTemplate

if TYPE_CHECKING:
    from edgespec.heads.families import HiddenStateSource

_MAX_LOADS = 6  # of one model: each gives a card that failed less of it


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

    Raises:
        EdgeSpecError: by kind: UsageError, ModelFileError, HubError, MemoryLimitError, BackendError.
    """
    return open_engine(checked_config({"model": model, **options}), on_progress)


def open_engine(config: Config, on_progress: Progress | None = None) -> Engine:
    """Load the target and the drafter of a configuration; raises as `load`."""
    path = catalog.find(config.model.name, on_progress)
    warnings: list[str] = []
    for left in reversed(range(_MAX_LOADS)):
        state = LoadState(with_devices_left(config), on_progress or no_progress)
        state.warnings += warnings
        try:
            with state.undone_on_failure():
                engine = _open_engine(path, state)
            break
        except (DeviceLostError, DeviceMemoryError) as error:
            if not left:  # less of the target may not help a drafter that was placed by name
                raise
            less = "without it" if isinstance(error, DeviceLostError) else "with less on it"
            warnings.append(f"{error.what} Retrying {less}.")
    if config.memory.prompt_cache:
        _keep_prompts(engine, CheckedFiles(CacheKind.PROMPTS.folder, config.memory.prompt_cache_size))
    return engine


def _keep_prompts(engine: Engine, files: CheckedFiles) -> None:
    """Keep the states of sequences in files, those of the drafter too."""
    engine.prompt_files = files
    engine.target.stores.append(engine.target.store_in(files))
    if isinstance(engine.drafter, ModelDrafter):
        engine.drafter.keep_prompts(files)


def _open_engine(path: Path, state: LoadState) -> Engine:
    """The steps of loading, in order."""
    start = time.perf_counter()
    config = state.config
    state.on_progress(f"Loading {path.name}", 0.0)  # first of all, trials take seconds
    read_header(path)  # a file that is no model is refused at once
    try_kernels(state)  # their outcome is part of what a file is vetted for
    target_files = read_model(path)
    require_cache_type(config.model.kv, target_files.headers[0])
    if doubt := target_files.headers[0].doubt_about(config.model.context):
        asked = config.model.context != ModelConfig().context
        (state.warnings if asked else state.notes).append(doubt)
    fingerprint = target_files.headers[0].fingerprint
    state.n_threads = planned_threads(config.devices.threads, fingerprint, state.store)
    state.adapters = read_adapters(config.model.lora, target_files.headers[0])
    for adapter in state.adapters:
        require_loadable([adapter.header], target_files.headers[0])
    _connect_workers(target_files, state)
    planner = Planner.of_this_machine(
        target_files,
        config,
        PlacementRequest(config.devices, state.n_threads, state.store, state.on_progress, state.notes),
        adapters=state.adapters,
        projector=reserved_projector(path, config.model),
        workers=state.workers,
        measured=True,
    )
    decision = decide(planner, partial(find_drafter, on_progress=state.on_progress))
    state.notes += decision.notes
    drafter_files = decision.plan.drafter
    head = None if drafter_files is None else head_of(drafter_files)
    shown = None if head is None else hidden_states(head)
    plan, target, template = _open_planned(decision, shown, state)

    drafted_by = drafter_name(drafter_files, state)
    policy = open_policy(target_files, drafted_by, state)
    limits = tree_limits(plan, policy)
    if drafter_files is not None and head is not None and shown is not None:
        drafter: Drafter = open_head(head, drafter_files, target, shown, plan, state)
    else:
        drafter = open_drafter(target, limits, plan, state)

    keys = ProfileKeys.of(
        fingerprint,
        drafted_by,
        threads=target.context.n_threads,
        mode=f"{target.rule} {plan.kernels}{state.variant}",
        workers=plan.places if state.workers is None else f"{plan.places} {state.workers.identity}",
        drafter_device=plan.on_cards.drafter_name,
    )
    speculator = Speculator(
        target,
        drafter,
        ProfileUpdates(keys if config.speculation.learn else None, state.store),
        limits=limits,
        tree_budget=config.speculation.tree_budget,
        policy=policy,
        costs=pair_costs(target, drafter, limits, keys, state),
        answers=plan.sequences.sequences or 1,
        earlier=Answers() if config.speculation.drafts_from_answers else None,
        read_share_alone=decision.read_share_alone,
    )
    return Engine(
        target,
        speculator,
        Encoder(target.model.vocabulary, template, config.model.context, _image_reader(path, state)),
        state.abort,
        context=config.model.context,
        texts=plan.sequences.sequences,
        loaded=Loaded(
            exact=bool(config.speculation.exact),
            load_s=time.perf_counter() - start,
            keys=keys,
            memory=plan.use(target.model),
            notes=state.notes,
            warnings=state.warnings,
        ),
    )


def _image_reader(path: Path, state: LoadState) -> ImageReader:
    """The reader of images for the target, which looks for a projector when there is one to read."""
    given = named_projector(state.config.model.mmproj)
    projector = None if given is None else find_projector(path, given).path
    context = state.config.model.context
    if doubt := doubt_about(path, projector):
        state.warnings.append(doubt)
    return ImageReader(
        path,
        projector,
        threads=state.n_threads,
        context=context,
    )


def _open_planned(
    decision: Decision, shown: HiddenStateSource | None, state: LoadState
) -> tuple[Plan, Target, ChatTemplate | None]:
    """The target, opened by a plan: with less on devices, if these have too little memory.

    What a device says is free may be gone a moment later, and drivers take some of it themselves.
    """

    def while_loading(plan: Plan) -> None:
        """Load the drafter while the disk is busy with the target; a head is opened after its target."""
        if drafter is not None and shown is None and state.drafter is None:
            state.drafter = open_drafting_model(drafter, plan, state, devices=plan.on_cards.drafter)

    drafter = decision.plan.drafter
    for _ in range(shortages()):
        decision = decision.with_less_on_cards()
    while True:
        plan = state.plan = decision.plan
        state.drafter = None
        try:
            with state.undone_on_memory_limit():
                state.notes += plan.notes
                state.warnings += plan.warnings
                return open_target(plan, state, shown, while_loading)
        except MemoryLimitError as error:
            if not plan.on_cards.layers_there:
                raise
            decision = decision.with_less_on_cards()
            placed = decision.plan.on_cards.placed
            where = "nothing" if placed is None or not placed.elsewhere else f"less there ({placed.where})"
            state.warnings.append(
                f"A device ran out of memory ({error.what.rstrip('.')}): retrying with {where}."
            )


def try_kernels(state: LoadState) -> None:
    """Make sure that the kernel layouts in use were tried on this processor.

    Raises:
        UsageError: exact decoding with large trees was asked for, which takes EdgeSpec's own kernels.
    """
    if needs_build():
        state.on_progress("Compiling EdgeSpec's kernels (once)", 0.0)
        build_once()  # without them, nothing is streamed, whatever kernels compute
    if stored_report() is None:
        state.on_progress("Trying the processor's kernels (once)", 0.0)
    report = ensure_report()
    state.notes += report_notes(report)
    if own_allowed() and not own_in_use():
        problem, remedy = own_fault(report.problems.get(OWN, ""))
        text = f"EdgeSpec's own kernels are not used: {problem}. {cost_of_missing(OWN)} {remedy}".rstrip()
        (state.warnings if remedy else state.notes).append(text)
    if not own_in_use():
        state.config.speculation.require_exact_budget(MAX_PADDED_ROWS)


def _connect_workers(files: ModelFiles, state: LoadState) -> None:
    """Connect to the workers that were named; raises as `workers.connect`."""
    if not state.config.devices.workers:
        return
    from edgespec.loading.workers import connect

    state.on_progress("Connecting to workers", 0.0)
    workers = connect(files, state)
    state.workers = None if workers is None else state.register(workers)


def with_devices_left(config: Config) -> Config:
    """The configuration without devices that are lost; without any, if no other one may be used.

    A drafter may be what a card had no memory for. After that, it is on a card only if it was asked for.
    """
    devices, lost = config.devices, lost_devices()
    if shortages() and devices.draft_device == AUTO:
        config = config.with_(draft_device=NONE)
    if not lost:
        return config
    names = tuple(name for name in devices.names if name not in lost)
    if devices.draft_device in lost:
        config = config.with_(draft_device=NONE)
    if names or (current_build().gpus and not devices.names):
        return config.with_(device=names)
    return config.with_(device=(), gpu_layers=0, draft_device=NONE)
