"""Plans for every file of a repository, so that a person can choose one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from edgespec.base.progress import Progress
from edgespec.config import AUTO, Config
from edgespec.errors import BackendError, EdgeSpecError, HubError, MemoryLimitError
from edgespec.kernels.report_store import ensure_report
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.measure.threads import planned_threads
from edgespec.models.gguf.embedding import embedding_shape
from edgespec.models.gguf.head_family import head_family
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.weightless import QUANTIZATIONS
from edgespec.models.hub import catalog
from edgespec.models.hub.cache import cached_models
from edgespec.models.hub.inspection import InspectedModel, RemoteHeaders
from edgespec.models.hub.names import HubName, ModelVariant
from edgespec.models.hub.quality import KEEPS_QUALITY, perplexity_loss
from edgespec.models.hub.repository import Hub, Repository, find_repository
from edgespec.planning.devices.finding import PlacementRequest
from edgespec.planning.drafter import FoundDrafter, find_drafter
from edgespec.planning.planner import Planner
from edgespec.planning.report.model_report import find_named
from edgespec.planning.report.predictions import report_on
from edgespec.planning.report.report import PlanReport
from edgespec.profiles.store import ProfileStore

_AT_ONCE = 4  # headers that are read


@dataclass(frozen=True)
class FilePlan:
    """A file of a repository, or the parts of a split one, and how it would run here."""

    name: str  # what selects it: its quantization, or its file name where several have the same or none
    n_bytes: int
    bits: float  # of a weight, on average
    loss: float | None  # published share by which its quantization raises perplexity
    here: bool = False
    plan: PlanReport | None = None  # with the drafter that helps most; None if it cannot run
    refusal: str = ""  # why not

    @property
    def tokens_per_second(self) -> float:
        """The speed on prose, with drafts if these help; 0 if it cannot run."""
        plan = self.plan
        return max(plan.plain.tokens_per_second, plan.chosen.tokens_per_second) if plan else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.n_bytes,
            "bits_per_weight": round(self.bits, 3),
            "perplexity_loss": None if self.loss is None else round(self.loss, 4),
            "here": self.here,
            "plan": None if self.plan is None else self.plan.to_json(),
            "refusal": self.refusal or None,
        }


@dataclass(frozen=True)
class RepositoryPlan:
    """The files of a repository, the smallest first."""

    repo: str
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...] = ()
    guessed: bool = False  # the Hub could not be asked, so these are the usual files

    @property
    def fastest(self) -> FilePlan | None:
        """The fastest file, on prose, that keeps quality; None if no such file can run."""
        keep = (f for f in self.files if f.plan and f.loss is not None and f.loss < KEEPS_QUALITY)
        return max(keep, key=lambda f: f.tokens_per_second, default=None)

    def to_json(self) -> dict[str, Any]:
        fastest = self.fastest
        return {
            "repository": self.repo,
            "files": [file.to_json() for file in self.files],
            "fastest": None if fastest is None else fastest.name,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Listed:
    """A model of a repository by its headers."""

    name: str
    label: str
    model: InspectedModel
    here: bool = False


def repository_of(model: str) -> HubName | None:
    """The repository that a name means without choosing a file there; None if it means one file."""
    name, known = catalog.hub_name_of(model), catalog.named(model)
    if name is None or (known is not None and known[1]):
        return None
    return replace(name, pick=None) if known is not None or name.pick is None else None


def plan_repository(
    name: HubName,
    config: Config,
    on_progress: Progress,
    *,
    hub: Hub | None = None,
    temperature: float = 0.0,
) -> RepositoryPlan | None:
    """Plans for all files of a repository; None if there is no choice among several models that write text.

    Only headers are read. Without a network, the catalog's sizes stand in for them, unless a file is here.

    Raises:
        HubError: the Hub cannot be asked, and the catalog does not know the repository.
    """
    notes: list[str] = []
    guessed = False
    hub = hub or Hub.from_environment()
    entry = catalog.entry_for(name.repo)
    cached = {model.paths[0] for model, _ in cached_models(hub, name.repo)}
    on_progress(f"Asking the Hub about {name.repo}", 0.0)
    try:
        repository = find_repository(hub, name.repo)
    except HubError as error:
        if cached or entry is None or entry.shape is None:
            return None
        notes.append(
            f"{error.what} Sizes are approximate, from the catalog; the repository may not have every file."
        )
        listed, guessed = list(_from_catalog(entry)), True
    else:
        if len(repository.models) < 2:
            return None
        listed = list(_from_hub(hub, repository, cached, entry, notes, on_progress))
    store = ProfileStore()
    ensure_report()

    @cache
    def derived(threads: int) -> DerivedPasses:
        return DerivedPasses(store, threads, on_progress)

    files = [_planned(each, config, store, derived, on_progress, temperature) for each in listed]
    if not files:
        return None
    files.sort(key=lambda file: file.n_bytes)
    return RepositoryPlan(name.repo, tuple(files), tuple(notes), guessed)


def _from_catalog(entry: catalog.CatalogEntry) -> Iterator[_Listed]:
    for label in QUANTIZATIONS:
        files = entry.hollow_in(label)
        if files is not None and (label != "MXFP4" or entry.quant == "MXFP4"):
            yield _Listed(label, label, InspectedModel(files.headers, None, entry, approximate=True))


def _from_hub(
    hub: Hub,
    repository: Repository,
    cached: set[str],
    entry: catalog.CatalogEntry | None,
    notes: list[str],
    on_progress: Progress,
) -> Iterator[_Listed]:
    """The models that write text and whose headers can be read; notes name the others."""
    models = repository.models
    labels = [model.label for model in models]
    remote = RemoteHeaders(hub, repository)

    def read(model: ModelVariant) -> InspectedModel | EdgeSpecError:
        try:
            headers = [remote.read(file) for file in repository.files_of(model)]
        except EdgeSpecError as error:
            return error
        return InspectedModel(tuple(headers), None, entry)

    with ThreadPoolExecutor(_AT_ONCE) as readers:
        for number, (model, found) in enumerate(zip(models, readers.map(read, models), strict=True), start=1):
            on_progress(f"Reading headers of {repository.repo}", number / len(models))
            if isinstance(found, EdgeSpecError):
                notes.append(f"Left out: {found.what}")
            elif head_family(found.headers[0]) is None and embedding_shape(found.headers[0]) is None:
                unique = bool(model.label) and labels.count(model.label) == 1
                name = model.label if unique else model.paths[0]
                yield _Listed(name, model.label, found, model.paths[0] in cached)


def _planned(
    listed: _Listed,
    config: Config,
    store: ProfileStore,
    derived: Callable[[int], DerivedPasses],
    on_progress: Progress,
    temperature: float,
) -> FilePlan:
    headers = listed.model.headers
    files = ModelFiles.of_headers(headers)
    n_weights = sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors)
    row = FilePlan(
        listed.name,
        sum(header.file_bytes for header in headers),
        8 * sum(header.tensor_bytes for header in headers) / max(n_weights, 1),
        perplexity_loss(listed.label),
        listed.here,
    )
    threads = planned_threads(config.devices.threads, headers[0].fingerprint, store)
    request = PlacementRequest(config.devices, threads, store, on_progress, [])
    try:
        planner = Planner.of_this_machine(files, config, request)
        report = partial(
            report_on,
            listed.model,
            on_progress=on_progress,
            temperature=temperature,
            derived=derived(threads),
        )
        plans = [*_with_drafters(listed.model, planner, report, on_progress)]
    except (MemoryLimitError, BackendError) as error:
        return replace(row, refusal=error.what)
    return replace(row, plan=max(plans, key=lambda plan: plan.chosen.tokens_per_second))


def _with_drafters(
    model: InspectedModel, planner: Planner, plan: Callable[..., PlanReport], on_progress: Progress
) -> Iterator[PlanReport]:
    """The plan with the drafter that a load would take, and with each that the catalog knows."""
    speculation = planner.config.speculation
    if speculation.draft != AUTO:
        yield plan(planner, partial(find_named, on_progress=on_progress))
        return
    yield plan(planner, partial(find_drafter, on_progress=on_progress))
    for name in model.entry.drafters if model.entry else ():
        drafter = catalog.entries()[name].hollow
        if drafter is not None:
            named = replace(planner, config=planner.config.with_(draft=name))
            found = FoundDrafter(drafter)
            yield plan(named, partial(_given, found))


def _given(found: FoundDrafter, _: Planner) -> FoundDrafter:
    return found
