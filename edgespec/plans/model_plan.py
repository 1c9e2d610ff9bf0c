"""A plan for one model: its figures are looked up, or derived from those of other models measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP, curve_of_other_size
from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.planner import (
    Advice,
    Drafting,
    Passes,
    Prediction,
    PromptTime,
    advise,
    alternatives,
    best,
    predict_prompt,
)
from edgespec.costs.yields import Yields, expected_yields
from edgespec.errors import EdgeSpecError, MemoryLimitError
from edgespec.measure.threads import known_threads
from edgespec.measure.throughput import measure_reading
from edgespec.models.gguf.footprint import SPARE_CELLS, USUAL_NODES, Footprint, footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import agreement_of, candidates
from edgespec.models.hub.inspection import Seen, look_at
from edgespec.models.llama.prefill_chunks import LENGTHS, lengths_that_differ
from edgespec.models.llama.row_rule import MOST_ROWS
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.planning.budget import memory_room, predict_memory
from edgespec.offload.planning.needs import MOST_PROMPT_ROWS, affordable_rows
from edgespec.profiles.store import (
    DiskProfile,
    Keys,
    PassProfile,
    ProfileStore,
    disk_key,
    machine_identity,
)
from edgespec.progress import Progress
from edgespec.units import readable

_DIRECT_SHARE = 0.95  # of the disk's speed that reaches passes
_BESIDE_READS = 1.05  # how much longer arithmetic takes while layers are read
_PLAIN_KERNELS = 2.5  # the same without the kernels' own layout: seen from 2.3 to 2.9
_USUAL_AGREEMENT, _LOOKUP_AGREEMENT = 0.7, 0.2
_DISK_S = 1.0
_PROMPT_TOKENS = 2048
_WIDTH = 8


@dataclass(frozen=True)
class PlanWish:
    """What is to be planned.

    Attributes:
        model, draft: as for loading; no model is the default one.
        memory: bytes; more than is there is allowed, to see what it would give.
        threads: None takes as many as loading would.
        streams: stream even what would fit.
    """

    model: str | None = None
    draft: str = "auto"
    memory: int | None = None
    context: int = 4096
    threads: int | None = None
    temperature: float = 0.0
    streams: bool = False


@dataclass(frozen=True)
class Plan:
    """What to do, and what else there is.

    Attributes:
        chosen: the fastest way.
        plain: without drafts.
        drafter: the one whose trees are the fastest; "none" if none could draft.
        ways: the best tree of every drafter, the fastest first.
        sizes: every tree size with every drafter.
        advice: what would help most.
        prompt: how long a prompt takes to be read, "exact" and "not_exact".
        notes: where the figures come from, and how far they can be trusted.
        uncertain: some of them are derived, and may be off by half.
    """

    model: str
    chosen: Prediction
    plain: Prediction
    drafter: str
    ways: list[Prediction]
    sizes: list[Prediction]
    advice: list[Advice]
    prompt: dict[str, PromptTime] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uncertain: bool = False

    def to_json(self) -> dict[str, Any]:
        """What scripts see."""
        return {
            "model": self.model,
            "chosen": self.chosen.to_json(),
            "plain": self.plain.to_json(),
            "drafter": self.drafter,
            "ways": [way.to_json() for way in self.ways],
            "sizes": [size.to_json() for size in self.sizes],
            "advice": [advice.to_json() for advice in self.advice],
            "prompt": {mode: time.to_json() for mode, time in self.prompt.items()},
            "notes": self.notes,
            "uncertain": self.uncertain,
        }


def plan_for(wish: PlanWish, on_progress: Progress, store: ProfileStore | None = None) -> Plan:
    """The plan for a model that is here, or for one on the Hub, of which only the header is read.

    Raises:
        EdgeSpecError: the model or the drafter cannot be found.
        MemoryLimitError: the memory is too small; says how much would do.
    """
    return _Planning(wish, on_progress, store or ProfileStore()).plan()


class _Planning:
    """The steps of a plan, with what they share."""

    def __init__(self, wish: PlanWish, on_progress: Progress, store: ProfileStore) -> None:
        self._wish = wish
        self._on_progress = on_progress
        self._store = store
        self._notes: list[str] = []
        self._threads = wish.threads or 1

    def plan(self) -> Plan:
        wish = self._wish
        model = wish.model or str(catalog.find(None))
        seen = look_at(model, self._on_progress)
        self._threads = wish.threads or known_threads(seen.headers[0].fingerprint, self._store)
        self._machine = machine_identity() | {"threads": str(self._threads)}
        self._notes += seen.notes
        files = ModelFiles(seen.headers)
        room = memory_room(None)
        budget = wish.memory or room
        if budget > room:
            self._notes.append(f"{readable(budget)} are planned with, and {readable(room)} are free now.")
        target = replace(self._footprint(seen.headers[0]), weights=files.tensor_bytes)
        plain_holding = predict_memory([target], files, budget, streams=wish.streams)
        passes = self._passes(seen, plain_holding)
        most = MOST_ROWS if plain_holding.streamed_bytes else USUAL_NODES
        found: list[tuple[Drafting, PlannedMemory, Footprint | None]] = [
            (Drafting("none"), plain_holding, None)
        ]
        for drafting, size in self._draftings(seen):
            try:
                held = (
                    predict_memory([target, size], files, budget, streams=wish.streams)
                    if size
                    else plain_holding
                )
            except MemoryLimitError:
                self._notes.append(f"There is no room for {drafting.name}.")
                continue
            found.append((drafting, held, size))
        sizes = [alternatives(held, passes, drafting, most) for drafting, held, _ in found]
        ways = [
            (_fastest(of_one), drafting, size)
            for of_one, (drafting, _, size) in zip(sizes, found, strict=True)
        ]
        # What the text itself will draft is anybody's guess until it was seen.
        chosen = best(way for way, d, _ in ways if d.step is not None or d.measured)
        drafting, size = next((d, s) for way, d, s in ways if way is chosen)
        prints = [target, size] if size else [target]
        if drafting.yields is not None:
            self._notes.append(f"Tokens a pass with {drafting.name}: {drafting.source}.")
        if chosen.holding.streamed_bytes:
            self._tell_of_packing(files, chosen, passes, drafting, most)
        more = self._more_memory(prints, files, chosen)
        sure = passes.measured and (drafting.yields is None or drafting.measured)
        if not sure:
            self._notes.append(
                "Derived figures may be off by half: 'edgespec profile' with this model and drafter "
                "measures them."
            )
        plain = next(way for way, d, _ in ways if d.name == "none")
        return Plan(
            model=wish.model or seen.headers[0].path.stem,
            chosen=chosen,
            plain=plain,
            drafter=max(
                (way for way, d, _ in ways if d.yields is not None),
                key=lambda way: way.tokens_per_second,
                default=plain,
            ).drafter,
            ways=sorted((way for way, _, _ in ways), key=lambda way: -way.tokens_per_second),
            sizes=[size for of_one in sizes for size in of_one],
            advice=advise(chosen, passes, drafting, most, more),
            prompt=self._prompt(seen.headers[0], chosen.holding, passes),
            notes=self._notes,
            uncertain=not sure,
        )

    def _tell_of_packing(
        self, files: ModelFiles, chosen: Prediction, passes: Passes, drafting: Drafting, most: int
    ) -> None:
        """What the packed file takes, and what it gives."""
        layers = files.layers()
        if not gains_from_packing(layers):
            self._notes.append("Packing would gain nothing: no weight has a kernel layout of its own.")
            return
        unpacked = replace(passes, compute=passes.compute.scaled(_PLAIN_KERNELS))
        without = best(alternatives(chosen.holding, unpacked, drafting, most))
        size = sum(layer.n_bytes for layer in layers)
        self._notes.append(
            f"The packed file takes {readable(size)} of disk. Without it (--pack never): about "
            f"{without.tokens_per_second:.2f} tokens/s."
        )

    def _prompt(self, header: GGUFHeader, holding: PlannedMemory, passes: Passes) -> dict[str, PromptTime]:
        """What reading a prompt takes, bit-exact and not."""
        tokens = min(_PROMPT_TOKENS, self._wish.context // 2)
        exact, longest = MOST_ROWS, MOST_PROMPT_ROWS
        if holding.streamed_bytes:
            sizes = {n: self._footprint(header, n).buffers for n in (USUAL_NODES, *LENGTHS)}
            longest = affordable_rows(sizes, holding.budget, exact=False)
            most = affordable_rows(sizes, holding.budget, exact=True)
            differ = lengths_that_differ(user_cache_path("edgespec") / "rows", header.fingerprint)
            exact = max((n for n in LENGTHS if n <= most and n not in differ), default=MOST_ROWS)
        return {
            "exact": predict_prompt(holding, passes, tokens, exact),
            "not_exact": predict_prompt(holding, passes, tokens, longest),
        }

    def _footprint(self, header: GGUFHeader, rows: int = USUAL_NODES) -> Footprint:
        cells = self._wish.context + SPARE_CELLS
        return footprint(header, n_cells=cells, n_outputs=USUAL_NODES, n_rows=rows)

    def _passes(self, seen: Seen, holding: PlannedMemory) -> Passes:
        """The target's passes: its own, or derived from those of another model."""
        streams = holding.streamed_bytes > 0
        known = list(self._store.all_passes(**self._machine, model=seen.headers[0].fingerprint))
        # Streamed passes are padded, and tell nothing of how few rows do in memory.
        own = _preferred([profile for profile in known if streams or not profile.streamed], streams)
        profile = own or self._reference(seen)
        compute = profile.compute if own else _derived(profile, seen)
        if streams and not profile.streamed:
            compute = compute.scaled(_BESIDE_READS)
        rate, rate_source = 0.0, ""
        if streams:
            rate, rate_source = self._read_rate(seen, own)
        source = "Passes: measured with this model here" if own else "Passes: derived from another model's"
        overlap = profile.overlap if profile.streamed else USUAL_OVERLAP
        if own and own.quick:
            source += ", in a hurry"
        if profile.disturbed:
            source += ", while other programs kept the processor busy (so they may be faster)"
        self._notes.append(f"{source}{rate_source}.")
        return Passes(
            compute, rate, profile.accept_s, overlap, measured=own is not None and not own.disturbed
        )

    def _reference(self, seen: Seen) -> PassProfile:
        """The model measured in memory here that is nearest in size; the default model, if none was yet."""
        known = self._measured_in_memory()
        if not known:
            from edgespec.loading.load import load

            self._on_progress("Measuring this machine with the default model (once)", 0.0)
            load(draft="lookup", threads=self._threads, context=512).close()
            known = self._measured_in_memory()
        size = _parameters(seen.headers)
        return min(
            known,
            key=lambda profile: (profile.disturbed, profile.quick, abs(math.log(profile.parameters / size))),
        )

    def _measured_in_memory(self) -> list[PassProfile]:
        return [profile for profile in self._store.all_passes(**self._machine) if not profile.streamed]

    def _read_rate(self, seen: Seen, own: PassProfile | None) -> tuple[float, str]:
        """Bytes of weights that will arrive a second, and where that is known from."""
        if own is not None and own.read_rate:
            return own.read_rate, ", reading included"
        place = seen.path or _existing(user_cache_path("edgespec"))
        disk = self._store.disk(disk_key(place))
        if disk is None and seen.path is not None:
            disk = self._measured_disk(seen.path)
        if disk is None:
            disk = self._measured_disk(catalog.find(None))
        return disk.speed * _DIRECT_SHARE, f"; the disk gives {disk.speed / 1e9:.2f} GB/s"

    def _measured_disk(self, path: Path) -> DiskProfile:
        disk = measure_reading(path, _DISK_S, self._on_progress)
        self._store.put(disk_key(path), disk)
        return disk

    def _draftings(self, seen: Seen) -> list[tuple[Drafting, Footprint | None]]:
        """What could draft, with the memory it takes."""
        draft = self._wish.draft
        if draft == "none":
            return []
        found: list[tuple[Drafting, Footprint | None]] = []
        if draft not in ("auto", "lookup"):
            small = look_at(draft, self._on_progress)
            top1 = agreement_of(seen.headers[0], small.path) if seen.path and small.path else None
            found.append(self._with_model(seen, small, top1))
        elif draft == "auto":
            for candidate in candidates(seen.headers[0]) if seen.path else ():
                try:
                    found.append(self._with_model(seen, look_at(str(candidate.path)), candidate.top1))
                except EdgeSpecError:
                    continue
        yields = self._yields(seen, "lookup")
        source = "measured with this pair" if yields else "a guess, as it depends on the text"
        lookup = Drafting(
            "prompt lookup",
            yields or expected_yields(_LOOKUP_AGREEMENT),
            source=source,
            measured=yields is not None,
        )
        found.append((lookup, None))
        return found

    def _with_model(self, seen: Seen, small: Seen, top1: float | None) -> tuple[Drafting, Footprint]:
        header = small.headers[0]
        keys = self._keys(seen, header.fingerprint)
        steps = self._store.drafts(keys.drafts)
        yields = self._yields(seen, header.fingerprint)
        if yields is not None:
            source = "measured with this pair"
        elif top1 is not None:
            source = f"derived from an agreement of {top1:.2f}"
        else:
            source = f"as of pairs that agree on {_USUAL_AGREEMENT:.0%} of tokens, which is usual"
        drafting = Drafting(
            name=(small.path.name if small.path else self._wish.draft),
            yields=yields or expected_yields(top1 or _USUAL_AGREEMENT),
            step=steps.step if steps else _derived(self._reference(small), small),
            overhead=steps.overhead if steps else 1.1,
            width=_WIDTH,
            source=source,
            measured=yields is not None and steps is not None,
        )
        return drafting, self._footprint(header)

    def _keys(self, seen: Seen, drafter: str) -> Keys:
        return Keys.of(seen.headers[0].fingerprint, drafter, threads=self._threads, mode="")

    def _yields(self, seen: Seen, drafter: str) -> Yields | None:
        """What trees of the pair yield at the wished temperature, if that was measured."""
        return self._store.yields_at(self._keys(seen, drafter), self._wish.temperature)

    def _more_memory(
        self, prints: list[Footprint], files: ModelFiles, chosen: Prediction
    ) -> list[tuple[str, PlannedMemory]]:
        """Half as much memory again, and enough for everything."""
        holding = chosen.holding
        if not holding.streamed_bytes:
            return []
        found = []
        half = holding.budget // 2
        if holding.budget + half < holding.needed:
            found.append(
                (f"{readable(half)} more memory", predict_memory(prints, files, holding.budget + half))
            )
        short = holding.needed - holding.budget
        found.append(
            (f"{readable(short)} more memory (all of it)", predict_memory(prints, files, holding.needed))
        )
        return found


def _fastest(sizes: list[Prediction]) -> Prediction:
    """The best tree; plain decoding where there are none."""
    return best(sizes[1:]) if len(sizes) > 1 else sizes[0]


def _preferred(known: list[PassProfile], streams: bool) -> PassProfile | None:
    """The profile that was measured with care, and with the weights held alike."""
    return min(
        known,
        key=lambda profile: (profile.disturbed, profile.quick, profile.streamed != streams),
        default=None,
    )


def _derived(reference: PassProfile, seen: Seen) -> Curve:
    """The reference's passes for a model of another size."""
    by_bytes = sum(header.tensor_bytes for header in seen.headers) / max(reference.weight_bytes, 1)
    by_parameters = _parameters(seen.headers) / max(reference.parameters, 1)
    return curve_of_other_size(reference.compute, by_bytes, by_parameters)


def _parameters(headers: tuple[GGUFHeader, ...]) -> int:
    return sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
