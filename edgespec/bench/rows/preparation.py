"""Turns a request into rows that can be measured: finds the model and its drafter."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgespec.base.progress import Progress
from edgespec.bench.rows.figures import RowSpec, rows_for
from edgespec.bench.rows.runner import RunConfig
from edgespec.config import AUTO, Config, ModelConfig
from edgespec.errors import MemoryLimitError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.heads.mtp import MTP_NAME
from edgespec.machine.cores import default_threads, probe_cores
from edgespec.machine.disks import disk_of
from edgespec.machine.memory import probe_memory
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.hub import catalog
from edgespec.offload.layout import round_up
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.drafter import find_drafter
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileStore
from edgespec.version import __version__

_MAX_TEXTS = 256  # llama.cpp's most sequences
_TEMPLATE_TOKENS = 128


@dataclass(frozen=True)
class BenchRequest:
    """The model, the rows, and what is asked."""

    load: Config  # shared by all rows
    config: GenerationConfig
    trees: Sequence[int | str]  # node budgets; "auto" is a tree sized by cost
    context: int | None = None  # tokens; None for as many as the prompts and answers take
    workload: Path | None = None  # a file of questions; None for our own
    prompts: int = 3
    repetitions: int = 3
    row_seconds: float = 60.0
    texts: Sequence[int] = ()  # numbers of texts to answer at once
    command: str = "edgespec bench"

    def check(self) -> None:
        """Check the numbers alone."""
        for name, value, most in [
            ("--prompts", self.prompts, 10_000),
            ("--repetitions", self.repetitions, 10_000),
            *(("--parallel", texts, _MAX_TEXTS) for texts in self.texts),
        ]:
            if not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most}, not {value}.")
        if not 0 < self.row_seconds < 1e6:
            raise UsageError(f"--row-seconds must be above 0, not {self.row_seconds:g}.")


@dataclass(frozen=True)
class PreparedBench:
    """Rows that are ready to be measured."""

    specs: list[RowSpec]
    run_config: RunConfig
    about: dict[str, Any]  # the part of the document that is known beforehand


def prepare_bench(request: BenchRequest, on_progress: Progress) -> PreparedBench:
    """Find all that is needed."""
    questions = read_questions(request.workload) if request.workload else own_questions()
    prompts = [question.text for question in balanced(questions, request.prompts)]
    target = catalog.find(request.load.model.name, on_progress)
    context = request.context or context_for(prompts, request.config.max_tokens or 0)
    load = request.load.with_(model=target, context=context)
    header = read_header(target)
    marks: tuple[str, ...] = ("widened",) if "edgespec.widened_from" in header.metadata else ()
    marks += ("on workers",) if load.devices.workers else ()
    files = ModelFiles.of(header)
    threads, store = load.devices.threads or default_threads(), ProfileStore()
    notes: list[str] = []
    # Rows have budgets and trees of their own; the largest trees need the most.
    trees = [tree for tree in request.trees if isinstance(tree, int)]
    planner = Planner.of_this_machine(
        files,
        load.with_(memory=None, offload=AUTO, tree_budget=max(trees, default=None)),
        PlacementRequest(load.devices, threads, store, on_progress, notes),
    )
    room = planner.machine.free.available
    limit = min(load.memory.limit or room, room)
    drafts = find_drafter(replace(planner, config=load.with_(memory=limit, offload=AUTO)), on_progress).files
    draft = "the text itself" if load.speculation.draft == AUTO else load.speculation.draft
    if isinstance(drafts, MTPLayers):
        draft = MTP_NAME
    elif drafts is not None:
        draft = drafts.paths[0].name
        load = load.with_(draft=drafts.paths[0])  # the same one for every row
    needs = planner.needs(drafts)

    def fits(budget: int) -> bool:
        """True if this memory and that of devices hold everything, so that nothing is streamed."""
        try:
            return planner.place(needs, drafts, budget=budget).memory.in_memory
        except MemoryLimitError:
            return False

    specs = rows_for(
        load,
        request.trees,
        request.texts,
        marks,
        fits=bool(load.devices.workers) or fits(limit),  # with workers, all weights are in some memory
        fits_machine=fits(room),
        experts=bool(layer_weights(files).experts),
    )
    config = request.config
    others = load.with_(model=None, memory=None, offload=AUTO).arguments()  # these have fields of their own
    times = {1: "once", 2: "twice"}.get(request.repetitions, f"{request.repetitions} times")
    how = "greedy" if config.greedy else f"temperature {config.temperature:g}, seed {config.seed}"
    about = {
        "title": f"edgespec bench: {files.paths[0].stem}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": request.command,
        "asked": f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}, {times}, at most "
        f"{config.max_tokens} tokens each, {how}",
        "machine": _describe_machine(files.paths[0]),
        "versions": {
            "edgespec": __version__,
            "llama-cpp-python": version("llama-cpp-python"),
            "python": platform.python_version(),
        },
        "model": {
            "name": files.paths[0].stem,
            "path": str(files.paths[0]),
            "bytes": files.tensor_bytes,
            "widened_from": header.metadata.get("edgespec.widened_from"),
        },
        "draft": draft,
        "settings": {
            "prompts": len(prompts),
            "workload": str(request.workload) if request.workload else None,
            "repetitions": request.repetitions,
            "row_seconds": request.row_seconds,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "verify": config.verify,
            "trees": list(request.trees),
            "texts": list(request.texts),
            "memory_bytes": load.memory.limit,
            "load": {"context": context, **others},
        },
        "notes": notes,
    }
    run_config = RunConfig(config, prompts, request.repetitions, request.row_seconds, files.paths)
    return PreparedBench(specs, run_config, about)


def context_for(prompts: Sequence[str], max_tokens: int) -> int:
    """Tokens that hold any of the prompts, its chat template and the answer; at most the default context.

    A token is at least a byte. A larger context would take memory that weights could have.
    """
    longest = max(len(prompt.encode()) for prompt in prompts)
    return min(round_up(longest + _TEMPLATE_TOKENS + max_tokens, 256), ModelConfig().context)


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


_OWN = Path(__file__).with_name("workload.jsonl")


@dataclass(frozen=True)
class Question:
    identifier: str  # what the file calls it
    category: str  # the kind of question, for balance
    text: str  # what is asked


def own_questions() -> tuple[Question, ...]:
    """A few questions of our own: chat, code, summaries, translation and reasoning."""
    return read_questions(_OWN)


def read_questions(path: Path) -> tuple[Question, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON texts may contain other line separators
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", "Name a file with --workload."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file.", "--workload takes a file of JSON lines.") from error
    questions = tuple(
        _question(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not questions:
        raise UsageError(f"{path} contains no questions.", "--workload takes a file of JSON lines.")
    return questions


def balanced(questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """The first `count` of them, taking one of each category in turn."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = itertools.zip_longest(*by_category.values())
    taken = [question for round_ in rounds for question in round_ if question is not None]
    return tuple(taken[:count])


def _question(line: str, number: int, path: Path) -> Question:
    def wrong(what: str) -> UsageError:
        return UsageError(
            f"Line {number} of {path} {what}.",
            'A line is like {"question_id": 1, "category": "chat", "turns": ["Why is the sky blue?"]}.',
        )

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong("is not JSON") from error
    if not isinstance(row, dict):
        raise wrong("is not a JSON object")
    for name in ("question_id", "category", "turns"):
        if name not in row:
            raise wrong(f"has no '{name}'")
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise wrong("has no string as its first turn")
    return Question(str(row["question_id"]), str(row["category"]), turns[0])
