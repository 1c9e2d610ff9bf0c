"""Plan how a model would run here: a model on this machine, or one on the Hub by its header."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.config import Config
from edgespec.heads.mtp import read_mtp_file
from edgespec.images.facts import ProjectorFacts
from edgespec.images.projector import doubt_about, named_projector
from edgespec.kernels.report_store import ensure_report
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.measure.threads import planned_threads
from edgespec.models.gguf.embedding import embedding_shape, require_generation
from edgespec.models.gguf.footprint import require_cache_type
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import inspect_model
from edgespec.planning.adapters import read_adapters
from edgespec.planning.devices.cards import Cards
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.devices.workers import measure_workers, workers_in_words
from edgespec.planning.drafter import FoundDrafter, find_drafter
from edgespec.planning.embedder import EmbedderPlan, plan_embedder
from edgespec.planning.planner import Planner
from edgespec.planning.report.predictions import report_on
from edgespec.planning.report.report import PlanReport
from edgespec.planning.report.sight import image_notes, projector_facts
from edgespec.profiles.store import ProfileStore


def embedder_plan_for(config: Config, on_progress: Progress) -> EmbedderPlan | None:
    """The plan for an embedding model that is here or on the Hub; None for a model of another kind.

    Raises:
        EdgeSpecError: the model cannot be found or loaded.
        MemoryLimitError: it does not fit.
    """
    model = inspect_model(config.model.name or str(catalog.find(None)), on_progress)
    shape = embedding_shape(model.headers[0])
    if shape is None:
        return None
    if model.path is not None:
        ensure_report()  # part of what a file is vetted for
        require_loadable(model.headers)
    files = ModelFiles.of_headers(model.headers)
    plan = plan_embedder(files, shape, config, measured=model.path is not None)
    plan.require_room()
    return plan


def plan_for(
    config: Config,
    on_progress: Progress,
    store: ProfileStore | None = None,
    cards: Cards | None = None,
    *,
    temperature: float = 0.0,
    estimated: bool = False,
) -> PlanReport:
    """The report on a model that is here, or for one on the Hub, of which only the header is read.

    Args:
        config: its memory limit may be more than the machine has, to see what that would give.
        cards: to plan for cards that are not here.
        estimated: estimate what contexts take even if the model is here.

    Raises:
        EdgeSpecError: the model or the drafter cannot be found.
        MemoryLimitError: the memory is too small; names a size that suffices.
    """
    store, named = store or ProfileStore(), config.model
    model = inspect_model(named.name or str(catalog.find(None)), on_progress)
    header, notes = model.headers[0], list(model.notes)
    require_generation(header)
    require_cache_type(named.kv, header)
    if model.path is not None:
        ensure_report()  # part of what a file is vetted for
    files, threads = ModelFiles.of_headers(model.headers), config.devices.threads
    threads = planned_threads(threads, header.fingerprint, store)
    workers = None
    if config.devices.workers:
        on_progress("Connecting to workers", 0.0)
        workers = measure_workers(config.devices.workers, files, threads)
        notes += workers_in_words(workers, files)
    given = named_projector(named.mmproj)
    if model.path is not None and (doubt := doubt_about(model.path, given)):
        notes.append(doubt)
    projector = projector_facts(model, given)
    planner = Planner.of_this_machine(
        files,
        config,
        PlacementRequest(config.devices, threads, store, on_progress, notes),
        adapters=read_adapters(named.lora, header),
        projector=projector if named.reads_images else None,
        cards=cards,
        workers=workers,
        measured=model.path is not None and not estimated,
    )
    planner = _with_memory_named(planner, notes)
    find = partial(find_named, on_progress=on_progress)
    report = report_on(model, planner, find, on_progress, temperature=temperature, notes=notes)
    return _with_images(report, planner, projector)


def _with_images(report: PlanReport, planner: Planner, projector: ProjectorFacts | None) -> PlanReport:
    """A report that says what images take."""
    if projector is None:
        return report
    free, left = planner.machine.free, None
    if planner.projector is None:
        left = free.available + free.own - sum(report.memory.values())
    return replace(
        report,
        image_bytes=0 if planner.projector is None else planner.projector.reading_bytes,
        projector=projector,
        notes=[*report.notes, *image_notes(projector, report.context, left)],
    )


def find_named(planner: Planner, on_progress: Progress) -> FoundDrafter:
    """The drafter that a load would take; one that is named may be on the Hub."""
    speculation = planner.config.speculation
    if speculation.names_a_model:
        model = inspect_model(speculation.draft, on_progress)
        if model.path is None:
            is_mtp = head_family(model.headers[0]) is HeadFamily.MTP
            files = read_mtp_file(model.headers) if is_mtp else ModelFiles.of_headers(model.headers)
            approximate = (f"{speculation.draft}: its size is approximate.",) if model.approximate else ()
            return FoundDrafter(files, (*model.notes, *approximate), named=True)
    return find_drafter(planner, on_progress)


def _with_memory_named(planner: Planner, notes: list[str]) -> Planner:
    """The planner for a machine that has the memory that was named, if this one has less."""
    machine, limit = planner.machine, planner.config.memory.limit
    room = machine.free.budget()
    if limit is None or limit <= room:
        return planner
    notes.append(f"The plan is for {readable(limit)} of memory; {readable(room)} are free now.")
    free = replace(machine.free, available=max(limit, machine.free.available))
    return replace(planner, machine=replace(machine, free=free))
