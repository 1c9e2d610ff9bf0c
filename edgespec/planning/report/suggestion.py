"""The well-known models that this machine would run well, by plans for models without weights.

No model file is read and nothing is measured. Headers are made from the sizes in the catalog, and figures
that were never measured on this machine are assumed. That is enough for a choice, and no more.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.config import Config
from edgespec.costs.planner import USUAL_OVERHEAD, DraftingCosts, alternatives, best
from edgespec.costs.yields import USUAL_AGREEMENT, TreeYields, expected_yields
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.files.user_folders import cache_folder, expanded, nearest_existing
from edgespec.measure.derived_passes import known_curve
from edgespec.models.hub import catalog
from edgespec.models.hub.catalog import CatalogEntry
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.pass_costs import passes_of
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Planner
from edgespec.profiles.store import ProfileStore, disk_key

_LEAST, _MOST = 3, 5  # suggested models
USABLE = 2.0
"""Tokens a second below which no model is suggested: half a page takes three minutes."""

_WORTH_A_DRAFTER = 1.2  # times the speed without
_SPARE_DISK = 5 << 30
_DISK_RATE = 1.5e9  # bytes a second, of a disk that was never measured


@dataclass(frozen=True)
class Suggestion:
    """A model that would run here."""

    entry: CatalogEntry
    drafter: str  # to name with --draft; empty if drafting would gain little
    tokens_per_second: float
    download_bytes: int  # of the model and the drafter, as far as they are not here
    plan: Plan

    @property
    def streams(self) -> bool:
        """True if it is larger than the memory that is free."""
        return self.plan.streams


@dataclass(frozen=True)
class Resources:
    """The facts that a choice depends on."""

    machine: MachineSnapshot
    disk: int  # free bytes
    store: ProfileStore
    disk_rate: float = _DISK_RATE  # bytes a second
    here: frozenset[str] = frozenset()  # names of the catalog's models that are on this machine
    config: Config = field(default_factory=Config)

    @classmethod
    def of_this_machine(cls, store: ProfileStore, config: Config | None = None) -> Resources:
        """Read them as they are now."""
        profile = store.disk(disk_key(nearest_existing(cache_folder())))
        return cls(
            MachineSnapshot.read(),
            disk=shutil.disk_usage(nearest_existing(downloads_folder())).free,
            disk_rate=profile.speed if profile else _DISK_RATE,
            store=store,
            here=frozenset(
                entry.name
                for entry in catalog.entries().values()
                if entry.repo and _folder(entry, "snapshots").is_dir()
            ),
            config=config or Config(),
        )


def suggest(resources: Resources) -> list[Suggestion]:
    """Three to five models, small and quick to large and good; fewer if not as many have room and are usable.

    Each is faster than all larger ones; where such models are too few, the largest others join them.
    """
    possible = [
        found
        for entry in catalog.entries().values()
        if entry.suggested
        and (found := estimate(entry, resources)) is not None
        and found.tokens_per_second >= USABLE
    ]
    possible.sort(key=lambda found: -found.entry.parameters)
    chosen: list[Suggestion] = []
    for found in possible:
        if not chosen or found.tokens_per_second > chosen[-1].tokens_per_second:
            chosen.append(found)
    chosen += [found for found in possible if found not in chosen][: max(_LEAST - len(chosen), 0)]
    chosen.sort(key=lambda found: found.entry.parameters)
    steps = min(len(chosen), _MOST)
    return [chosen[round(step * (len(chosen) - 1) / max(steps - 1, 1))] for step in range(steps)]


def estimate(entry: CatalogEntry, resources: Resources) -> Suggestion | None:
    """The speed of a model with the drafter that helps most; None if there is no room for it."""
    found = [*_estimates(entry, resources)]
    if not found:
        return None
    fastest = max(found, key=lambda suggestion: suggestion.tokens_per_second)
    plain = found[0]
    worth = fastest.tokens_per_second > _WORTH_A_DRAFTER * plain.tokens_per_second
    return fastest if plain.drafter or worth else plain


def _estimates(entry: CatalogEntry, resources: Resources) -> Iterator[Suggestion]:
    """Plain decoding, and every drafter that there is room for."""
    target = entry.hollow
    if target is None:
        return
    planner = Planner(target, resources.config, resources.machine, resources.store)
    for drafter in (None, *(catalog.entries()[name] for name in entry.drafters)):
        missing = [e for e in (entry, drafter) if e is not None and e.name not in resources.here]
        download = sum(e.n_bytes for e in missing)
        try:
            plan = planner.plan(None if drafter is None else drafter.hollow)
        except (MemoryLimitError, BackendError):
            continue
        packed = entry.n_bytes if plan.streams else 0
        if download + packed + _SPARE_DISK > resources.disk:
            continue
        name = drafter.name if drafter is not None else ""
        yield Suggestion(entry, name, tokens_per_second(plan, resources), download, plan)


def tokens_per_second(plan: Plan, resources: Resources) -> float:
    """The speed with trees of the best size, as `edgespec plan` predicts it from the same plan."""
    threads, store = resources.machine.n_threads, resources.store
    compute = known_curve(plan.target.headers, store, threads)
    passes = passes_of(compute, resources.disk_rate, streams=plan.streams)
    drafting = DraftingCosts("none")
    if plan.drafter is not None:
        step = known_curve(plan.drafter.headers, store, threads)
        drafting = DraftingCosts(
            "drafter", _usual_yields(), step=step, overhead=USUAL_OVERHEAD, measured=False
        )
    sizes = alternatives(plan.holding, plan.over(passes), drafting, plan.context.n_outputs)
    return best(sizes).tokens_per_second


@functools.cache
def _usual_yields() -> TreeYields:
    return expected_yields(USUAL_AGREEMENT)


def downloads_folder() -> Path:
    """The folder in which huggingface-hub keeps downloads, without importing it, which takes long."""
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub:
        return expanded(hub)
    home = os.environ.get("HF_HOME")
    if home:
        return expanded(home) / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base) / "huggingface" / "hub"


def _folder(entry: CatalogEntry, name: str) -> Path:
    return downloads_folder() / f"models--{entry.repo.replace('/', '--')}" / name
