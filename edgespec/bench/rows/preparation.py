"""Turns a request into rows that can be measured: finds files and programs, and works out the limits."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgespec.bench.rows.capped import cap_kind, run_capped
from edgespec.bench.rows.llamacpp import (
    LlamaCppBatchRows,
    LlamaCppRows,
    LlamaCppSettings,
    find_programs,
    program_folder,
)
from edgespec.bench.rows.request import BenchRequest
from edgespec.bench.rows.row_spec import BUDGET_SHARE, RowOptions, RowSpec, rows_for
from edgespec.bench.rows.runner import CHILD, ComparedProgram, RunConfig, why_it_failed
from edgespec.bench.rows.synthetic import MixtureShape, synthetic_target
from edgespec.bench.rows.workload import balanced, own_questions, read_questions
from edgespec.config import AUTO, Config, ModelConfig
from edgespec.errors import BackendError, MemoryLimitError, UsageError
from edgespec.heads.mtp import MTP_NAME
from edgespec.machine.cores import default_threads, probe_cores
from edgespec.machine.disks import disk_of
from edgespec.machine.memory import probe_memory
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.offload.layout import round_up
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.drafter import find_drafter
from edgespec.planning.plan import Planner
from edgespec.profiles.store import ProfileStore
from edgespec.progress import Progress
from edgespec.units import readable
from edgespec.version import __version__

_TEMPLATE_TOKENS = 128
USUAL_HELD = (25, 50, 75)  # percent of the experts


@dataclass(frozen=True)
class PreparedBench:
    """Rows that are ready to be measured.

    Attributes:
        about: the part of the document that is known beforehand.
    """

    specs: list[RowSpec]
    run_config: RunConfig
    others: Sequence[ComparedProgram]
    about: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def prepared_bench(request: BenchRequest, on_progress: Progress) -> Iterator[PreparedBench]:
    """Find or make all that is needed; what was made is removed afterwards.

    Raises:
        EdgeSpecError: something is missing, or cannot be done.
    """
    questions = read_questions(request.workload) if request.workload else own_questions()
    texts = [question.text for question in balanced(questions, request.prompts)]
    if request.compare:
        # Checked first, before anything takes time; with "auto", whether there is a drafter is only known
        # later.
        speculative = request.load.speculation.names_a_model or (
            request.synthesize is not None and request.load.speculation.draft == AUTO
        )
        find_programs(request.compare, speculative=speculative)
    source = catalog.find(request.load.model.name, on_progress)
    with contextlib.ExitStack() as stack:
        target = source
        context = request.context or context_for(texts, request.config.max_tokens or 0)
        load = request.load.with_(context=context)
        if request.synthesize is not None:
            if load.speculation.draft == AUTO:
                load = load.with_(draft=source)
            target = stack.enter_context(
                synthetic_target(source, request.synthesize, keep=request.keep, on_progress=on_progress)
            )
        load = load.with_(model=target)
        header = read_header(target)
        marks = tuple(mark for mark in ("widened", "mixed") if f"edgespec.{mark}_from" in header.metadata)
        marks += ("on workers",) if load.devices.workers else ()
        files = ModelFiles.of(header)
        held = _held(request, files, load)
        if held and load.memory.limit is None and request.cap is None:
            request = replace(request, cap=int(min(held.values()) / BUDGET_SHARE))
        options = RowOptions(load, request.trees, request.cap, marks, request.texts, held)
        notes: list[str] = []
        threads, store = load.devices.threads or default_threads(), ProfileStore()
        # Rows have budgets and trees of their own; the largest trees need the most.
        trees = [tree for tree in request.trees if isinstance(tree, int)]
        planner = Planner.of_this_machine(
            files,
            load.with_(memory=None, offload=AUTO, tree_budget=max(trees, default=None)),
            PlacementRequest(load.devices, threads, store, on_progress, notes),
        )
        room = planner.machine.free.available
        limit = min(options.limit or room, room)
        within = replace(planner, config=load.with_(memory=limit, offload=AUTO))
        drafts = find_drafter(within, on_progress).files
        drafter = None if drafts is None or isinstance(drafts, MTPLayers) else drafts.paths[0]
        if drafter is not None:
            load = load.with_(draft=drafter)  # the same one for every row
            options = replace(options, load=load)
        programs = None
        if request.compare:
            programs = find_programs(request.compare, speculative=drafter is not None)
        needs = planner.needs(drafts)

        def fits(budget: int) -> bool:
            """True if this memory and that of devices hold everything, so that nothing is streamed."""
            try:
                return planner.place(needs, drafts, budget=budget).memory.in_memory
            except MemoryLimitError:
                return False

        experts = bool(layer_weights(files).experts)
        shared = bool(load.devices.workers)  # with other machines, all weights are in some memory
        specs = rows_for(options, fits=shared or fits(limit), fits_machine=fits(room), experts=experts)
        run_config = RunConfig(
            request.config,
            texts,
            request.repetitions,
            request.row_seconds,
            request.cap,
            files.paths,
        )
        theirs = LlamaCppSettings(
            files.paths[0],
            files.tensor_bytes,
            request.cap if cap_kind() != "none" else None,
            context,
            threads,
            request.config,
            request.repetitions,
            request.row_seconds,
            marks,
        )
        others: list[ComparedProgram] = []
        if programs is not None:
            others.append(LlamaCppRows(programs, drafter, theirs))
        if request.texts:
            others.append(LlamaCppBatchRows(program_folder(request.compare), request.texts, theirs))
        about = _about(request, header, files, options, len(texts))
        about["notes"] += notes
        draft = load.speculation.draft
        about["draft"] = drafter.name if drafter else "the text itself" if draft == AUTO else draft
        if drafter is None and drafts is not None:
            about["draft"] = MTP_NAME
        yield PreparedBench(specs, run_config, others, about)


def context_for(prompts: Sequence[str], max_tokens: int) -> int:
    """Tokens that hold any of the prompts, its chat template and the answer; at most the default context.

    A token is at least a byte. A larger context would take memory that weights could have.
    """
    longest = max(len(prompt.encode()) for prompt in prompts)
    return min(round_up(longest + _TEMPLATE_TOKENS + max_tokens, 256), ModelConfig().context)


def _held(request: BenchRequest, files: ModelFiles, load: Config) -> dict[int, int]:
    """Percents of the experts to hold in rows of their own, and the budgets that hold them.

    Raises:
        UsageError: rows were asked for, and there are no experts to stream.
    """
    made = isinstance(request.synthesize, MixtureShape)
    percents = (USUAL_HELD if made else ()) if request.held is None else request.held
    if not percents:
        return {}
    if not layer_weights(files).experts or load.memory.experts == "never":
        raise UsageError(
            f"{files.paths[0].name} does not stream single experts.",
            "Leave out --held, or add --synthesize moe:64x4.",
        )
    # A process like those that will measure the rows knows best what it takes itself.
    task = {"role": "budgets", "model": str(files.paths[0]), "load": load.arguments(), "held": list(percents)}
    ended = run_capped(CHILD, None, text=json.dumps(task), keep_errors=True)
    if ended.status != 0:
        raise BackendError(why_it_failed(ended, None))
    result = json.loads(ended.output.splitlines()[-1])["result"]
    if "error" in result:
        raise BackendError(result["error"])
    return {int(percent): budget for percent, budget in result["budgets"].items()}


def _about(
    request: BenchRequest, header: GGUFHeader, files: ModelFiles, options: RowOptions, asked: int
) -> dict[str, Any]:
    """Everything in the document besides the figures."""
    widened_from = header.metadata.get("edgespec.widened_from")
    name = files.paths[0].stem
    if widened_from is not None:
        name = f"{Path(str(widened_from)).stem}, widened to {readable(files.tensor_bytes)}"
    kind = cap_kind() if request.cap is not None else "none"
    notes = []
    if request.cap is not None and kind == "none":
        notes.append(
            "No memory control group can be made here (it takes root, or systemd for the user): nothing is "
            "capped, and mapped models benefit from the system's page cache."
        )
    if options.limit is not None and request.cap is None:
        notes.append(
            "--memory holds EdgeSpec to its budget, but not the system's page cache; --memory-cap does both."
        )
    if widened_from is not None:
        notes.append(
            "The target is widened: its tokens are those of the small model it was made from, its bytes and "
            "arithmetic are those of a larger one. Its drafter agrees with it as it does with the small one."
        )
    mixed_from = header.metadata.get("edgespec.mixed_from")
    if mixed_from is not None:
        name = f"{Path(str(mixed_from)).stem}, mixed to {readable(files.tensor_bytes)}"
        notes.append(
            "The target is a synthetic mixture of experts: every expert computes what the feed-forward block "
            "of the small model computes that it was made from. Its router is synthetic, too, so how often "
            "experts are in memory says nothing about any real model."
        )
    config, load = request.config, options.load
    others = load.with_(model=None, memory=None, offload=AUTO).arguments()  # these have fields of their own
    times = {1: "once", 2: "twice"}.get(request.repetitions, f"{request.repetitions} times")
    how = "greedy" if config.greedy else f"temperature {config.temperature:g}, seed {config.seed}"
    return {
        "title": f"edgespec bench: {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": request.command,
        "asked": f"{asked} prompt{'' if asked == 1 else 's'}, {times}, at most {config.max_tokens} tokens "
        f"each, {how}",
        "machine": _describe_machine(files.paths[0]),
        "versions": _versions(),
        "model": {
            "name": name,
            "path": str(files.paths[0]),
            "bytes": files.tensor_bytes,
            "widened_from": widened_from,
            "mixed_from": mixed_from,
        },
        "limits": {"memory_bytes": options.limit, "cap_bytes": request.cap, "cap": kind},
        "settings": {
            "prompts": asked,
            "workload": str(request.workload) if request.workload else None,
            "repetitions": request.repetitions,
            "row_seconds": request.row_seconds,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "verify": config.verify,
            "trees": list(request.trees),
            "texts": list(request.texts),
            "load": {"context": load.model.context, **others},
        },
        "notes": notes,
    }


def _describe_machine(path: Path) -> dict[str, Any]:
    """The machine, and the disk that a file is on."""
    cores, memory, disk = probe_cores(), probe_memory(), disk_of(path)
    return {
        "cpu": cores.model,
        "cores": cores.usable,
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "disk": f"{disk.kind} {disk.device}".strip(),
        "system": platform.platform(terse=True),
    }


def _versions() -> dict[str, str | None]:
    """The versions of EdgeSpec, of llama.cpp's bindings, and of Python."""
    return {
        "edgespec": __version__,
        "llama-cpp-python": _version("llama-cpp-python"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
