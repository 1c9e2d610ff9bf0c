"""The well-known models that this machine would run well, estimated from the catalog in milliseconds.

No model file is read. The facts that a plan takes from a header are estimated from the number of parameters
and bytes, and figures that were never measured on this machine are assumed. That is enough for a choice, and
no more.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import curve_of_other_size
from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.planner import Drafting, Passes, Prediction, alternatives, best
from edgespec.costs.yields import Yields, expected_yields
from edgespec.machine.cores import default_threads
from edgespec.machine.memory import FreeMemory
from edgespec.measure.derived_passes import known_products, pass_curve
from edgespec.models.hub import catalog
from edgespec.models.hub.catalog import Entry
from edgespec.profiles.store import PassProfile, ProfileStore, disk_key, machine_identity

_AS_FAST_AS_READING = 5.0  # tokens a second
USABLE = 2.0
"""Tokens a second below which no model is suggested: half a page takes three minutes."""

_WORTH_A_DRAFTER = 1.2  # times the speed without
_SPARE_DISK = 5 << 30
_USUAL_AGREEMENT = 0.7  # as plans assume
_MOST_NODES = 32
_TELLING = 500_000_000  # parameters of a model whose passes say something of larger ones
_USUAL_TYPE = 12  # Q4_K, of which Q4_K_M files consist for the most part

# A machine that was never measured: a usual desktop's memory, arithmetic and disk.
_MEMORY_RATE = 25e9  # bytes of weights a second
_CORE_RATE = 80e9  # operations a second
_DISK_RATE = 1.5e9

# A usual transformer: bytes of cache for a token, by parameters, and everything besides weights and cache.
_CELL_BYTES, _CELL_BYTES_A_PARAMETER = 98_304, 3.3e-6
_CELLS = 4608
_OTHER_BYTES = 400 << 20
_LAYERS = 40


@dataclass(frozen=True)
class Suggestion:
    """A model that would run here.

    Attributes:
        drafter: the one to name with --draft; empty if drafting would gain little.
        tokens_per_second: about.
        download_bytes: of the model and the drafter, as far as they are not here.
        streams: whether it is larger than the memory that is free.
    """

    entry: Entry
    drafter: str
    tokens_per_second: float
    download_bytes: int
    streams: bool


@dataclass(frozen=True)
class Resources:
    """The facts that a choice depends on.

    Attributes:
        memory, disk: free bytes.
        disk_rate: bytes a second.
        reference: measured passes of some model; None if none were.
        products: seconds for a byte of weights, for each of kernels.report.ROWS; None if they are not known.
        threads: for models that were never measured.
        here: names of the catalog's models that are already here.
    """

    memory: int
    disk: int
    disk_rate: float = _DISK_RATE
    reference: PassProfile | None = None
    products: tuple[float, ...] | None = None
    threads: int = 4
    here: frozenset[str] = frozenset()

    @classmethod
    def of_this_machine(cls, store: ProfileStore | None = None) -> Resources:
        """As they are now."""
        store = store or ProfileStore()
        downloads = _nearest(downloads_folder())
        profile = store.disk(disk_key(_nearest(user_cache_path("edgespec"))))
        return cls(
            memory=FreeMemory.read().budget(),
            disk=shutil.disk_usage(downloads).free,
            disk_rate=profile.speed if profile else _DISK_RATE,
            reference=_reference(store),
            products=known_products(store, default_threads(), _USUAL_TYPE),
            threads=default_threads(),
            here=frozenset(
                entry.name
                for entry in catalog.entries().values()
                if entry.repo and _folder(entry, "snapshots").is_dir()
            ),
        )

    def compute(self, parameters: int, n_bytes: int) -> Curve:
        """Seconds of a pass over a model's weights in memory, by rows."""
        known = self.reference
        if known is not None and known.weight_bytes and known.parameters:
            return curve_of_other_size(
                known.compute, n_bytes / known.weight_bytes, parameters / known.parameters
            )
        if self.products is not None:
            return pass_curve([n_bytes * seconds for seconds in self.products], _LAYERS)
        row_s = 2 * parameters / (_CORE_RATE * self.threads)
        first_s = max(n_bytes / _MEMORY_RATE, row_s)
        return Curve.through((rows, max(first_s, rows * row_s)) for rows in (1, 2, 4, 8, 16, 32, 64))


def suggest(resources: Resources) -> list[Suggestion]:
    """The best model that is as fast as reading, or else the fastest; and a larger one that is usable.

    Empty if none has room and is usable.
    """
    possible = [
        found
        for entry in catalog.entries().values()
        if entry.suggested
        and (found := _estimated(entry, resources)) is not None
        and found.tokens_per_second >= USABLE
    ]
    if not possible:
        return []
    quick = [found for found in possible if found.tokens_per_second >= _AS_FAST_AS_READING]
    if quick:
        chosen = max(quick, key=lambda found: found.entry.parameters)
    else:
        chosen = max(possible, key=lambda found: found.tokens_per_second)
    larger = [found for found in possible if found.entry.parameters > 1.5 * chosen.entry.parameters]
    return [chosen, *([max(larger, key=lambda found: found.entry.parameters)] if larger else [])]


def _estimated(entry: Entry, resources: Resources) -> Suggestion | None:
    """The speed of a model with the drafter that helps most; None if there is no room for it."""
    found = []
    for drafter in (None, *(catalog.entries()[name] for name in entry.drafters)):
        held = _held(entry, drafter, resources.memory)
        if held is None:
            continue
        missing = [e for e in (entry, drafter) if e is not None and e.name not in resources.here]
        download = sum(e.n_bytes for e in missing)
        packed = entry.n_bytes if held.streamed_bytes else 0
        if download + packed + _SPARE_DISK > resources.disk:
            continue
        prediction = _predicted(entry, drafter, held, resources)
        name = drafter.name if drafter is not None else ""
        streams = held.streamed_bytes > 0
        found.append(Suggestion(entry, name, prediction.tokens_per_second, download, streams))
    if not found:
        return None
    fastest = max(found, key=lambda suggestion: suggestion.tokens_per_second)
    plain = found[0]
    worth = fastest.tokens_per_second > _WORTH_A_DRAFTER * plain.tokens_per_second
    return fastest if plain.drafter or worth else plain


def _held(entry: Entry, drafter: Entry | None, budget: int) -> PlannedMemory | None:
    """The places of the weights; None if not even the rest fits."""
    beside = _OTHER_BYTES + sum(
        round(_CELLS * (_CELL_BYTES + _CELL_BYTES_A_PARAMETER * e.parameters))
        for e in (entry, drafter)
        if e is not None
    )
    if drafter is not None:
        beside += drafter.n_bytes
    needed = entry.n_bytes + beside
    if needed <= budget:
        return PlannedMemory(budget, needed, entry.n_bytes)
    layer = entry.n_bytes // _LAYERS
    resident = budget - beside - 2 * layer
    if resident < 2 * layer:  # the embedding and the output
        return None
    return PlannedMemory(budget, needed, resident, entry.n_bytes - resident, layer, 2)


def _predicted(entry: Entry, drafter: Entry | None, held: PlannedMemory, resources: Resources) -> Prediction:
    passes = Passes(
        resources.compute(entry.parameters, entry.n_bytes), read_rate=resources.disk_rate, measured=False
    )
    drafting = Drafting("none")
    if drafter is not None:
        step = resources.compute(drafter.parameters, drafter.n_bytes)
        drafting = Drafting(drafter.name, _usual_yields(), step=step, overhead=1.1, measured=False)
    return best(alternatives(held, passes, drafting, _MOST_NODES))


@functools.cache
def _usual_yields() -> Yields:
    return expected_yields(_USUAL_AGREEMENT)


def _reference(store: ProfileStore) -> PassProfile | None:
    """The largest model measured in memory on this machine, as the most like those that are suggested.

    A small model, such as the bundled one, says little of them: caches hold its weights.
    """
    known: Sequence[PassProfile] = [
        profile
        for profile in store.all_passes(**machine_identity())
        if not profile.streamed and profile.parameters >= _TELLING
    ]
    return min(known, key=lambda p: (p.disturbed, p.quick, -math.log(max(p.parameters, 1))), default=None)


def downloads_folder() -> Path:
    """The folder in which huggingface-hub keeps downloads, without importing it, which takes long."""
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub:
        return Path(hub).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _folder(entry: Entry, name: str) -> Path:
    return downloads_folder() / f"models--{entry.repo.replace('/', '--')}" / name


def _nearest(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
