"""Plan how a model would run here: in memory or streamed, with which drafter, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, replace

from platformdirs import user_cache_path

from edgespec.costs.batches import SIZES, BatchPrediction, TextCells, fewest_texts, predict_batch
from edgespec.costs.planned_memory import HitRates, PlannedMemory
from edgespec.costs.planner import (
    Comparison,
    Drafting,
    Passes,
    Prediction,
    advise,
    alternatives,
    best,
)
from edgespec.costs.prompts import PromptTime, best_rows, predict_prompt, usual_prompt
from edgespec.errors import MemoryLimitError
from edgespec.kernels.layouts import own_in_use
from edgespec.loading.adapters import read_adapters, refuse_streaming
from edgespec.loading.devices.card_plan import placement_here
from edgespec.loading.devices.cards import Cards
from edgespec.loading.devices.crew_plan import CrewPlan
from edgespec.loading.devices.finding import CardRequest, open_cards
from edgespec.loading.devices.placed import Placed, Placement
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import (
    LARGE_NODES,
    SPARE_CELLS,
    USUAL_NODES,
    USUAL_TEXT,
    Footprint,
    cell_bytes,
    footprint,
    require_cache_type,
)
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import InspectedModel, inspect_model
from edgespec.models.llama.prefill_chunks import lengths_that_differ
from edgespec.models.llama.row_rule import MOST_PADDED_ROWS
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.planning.budget import memory_room, predict_memory
from edgespec.offload.planning.needs import MOST_PROMPT_ROWS, streamed_counts, with_second_copy
from edgespec.plans.draft_costs import DraftCosts
from edgespec.plans.pass_costs import PassCosts
from edgespec.plans.plan import BatchPlan, Plan, PlanRequest
from edgespec.profiles.store import ProfileStore
from edgespec.progress import Progress
from edgespec.units import readable

_PLAIN_KERNELS = 2.5  # how much longer arithmetic takes without packing: seen from 2.3 to 2.9
_PROMPTS = (1_000, 10_000, 50_000)  # tokens
_NO_OVERLAP = 1.0  # a layer's experts are known only when they are needed, so nothing hides their reading


def plan_for(
    request: PlanRequest,
    on_progress: Progress,
    store: ProfileStore | None = None,
    cards: Cards | None = None,
) -> Plan:
    """The plan for a model that is here, or for one on the Hub, of which only the header is read.

    Args:
        cards: to plan for cards that are not here.

    Raises:
        EdgeSpecError: the model or the drafter cannot be found.
        MemoryLimitError: the memory is too small; says how much would do.
    """
    return _Planning(request, on_progress, store or ProfileStore(), cards).plan()


@dataclass(frozen=True)
class _Candidate:
    """Plain decoding or one drafter, where weights are beside it, and every tree size with it.

    Attributes:
        here: passes of the whole target on the processor.
        passes: of the target with its weights where they are.
        most: nodes that a tree may have.
        drafter: its model; None if it has none.
    """

    drafting: Drafting
    placed: Placed
    here: Passes
    passes: Passes
    most: int
    drafter: InspectedModel | None
    sizes: tuple[Prediction, ...]


class _Planning:
    """The steps of a plan, with what they share."""

    def __init__(
        self, request: PlanRequest, on_progress: Progress, store: ProfileStore, cards: Cards | None
    ) -> None:
        self._request = request
        self._on_progress = on_progress
        self._store = store
        self._notes: list[str] = []
        self._hits = HitRates()
        self._adapter_bytes = 0
        self._cards = cards
        self._any_rows = own_in_use()  # whether exact passes may have any number of rows

    def plan(self) -> Plan:
        request = self._request
        model = inspect_model(request.model or str(catalog.find(None)), self._on_progress)
        header = model.headers[0]
        self._notes += model.notes
        files = ModelFiles(model.headers)
        require_cache_type(request.kv, header)
        self._adapter_bytes = sum(a.header.file_bytes for a in read_adapters(request.lora, header))
        room = memory_room(None)
        budget = request.memory or room
        if budget > room:
            self._notes.append(
                f"The plan is for {readable(budget)} of memory; {readable(room)} are free now."
            )
        target = self._target(files)
        known = self._store.experts(header.fingerprint)
        self._hits = HitRates.measured_at(known.held, known.hit_rate) if known else HitRates()
        threads = request.threads or known_threads(header.fingerprint, self._store)
        placement = self._placement(files, threads)
        placed = self._placed(placement, [target], budget)
        if request.lora and placed.holding.streamed_bytes:
            raise refuse_streaming()
        pass_costs = PassCosts(self._store, threads, self._on_progress)
        if placed.holding.streamed_bytes:
            here, _ = pass_costs.of_target(model, streams=True, padded=False)
            rows, placed = self._pieces(files, placement, [], budget, placed.over(here), request.context)
            target = self._target(files, rows)
        draft_costs = DraftCosts(model, self._store, pass_costs, threads, request.temperature)
        candidates = self._candidates(model, draft_costs, pass_costs, placement, target, budget, placed)
        plain, *drafters = candidates
        comparison = Comparison(plain.sizes[0], tuple(candidate.sizes for candidate in drafters))
        chosen = comparison.fastest
        way = next(candidate for candidate in candidates if any(chosen is size for size in candidate.sizes))
        self._notes += way.placed.notes
        self._notes += [
            f"Tokens a pass with {candidate.drafting.name}: {candidate.drafting.source}."
            for candidate in drafters
            if candidate.sizes
        ]
        if placed.holding.experts is not None and not self._hits.measured:
            self._notes.append(
                "How often experts are found in memory is assumed. Runs with this model measure it."
            )
        if chosen.holding.streamed_bytes:
            self._note_packing(files, chosen, way)
        sure = way.passes.measured and (way.drafting.yields is None or way.drafting.measured)
        if chosen.holding.experts is not None:
            sure = sure and self._hits.measured
        if not sure:
            self._notes.append(
                "Derived figures may be off by half: 'edgespec profile' with this model and drafter "
                "measures them."
            )
        return Plan(
            model=request.model or header.path.stem,
            comparison=comparison,
            advice=advise(
                chosen, way.passes, way.drafting, way.most, self._more_memory(placement, target, way)
            ),
            batch=self._batch(files, placement, plain),
            kv=request.kv,
            cache_bytes=request.context * cell_bytes(header, request.kv),
            adapter_bytes=self._adapter_bytes,
            prompts=self._prompts(files, placement, way, pass_costs.attend_s(model)),
            notes=list(dict.fromkeys(self._notes)),
            uncertain=not sure,
        )

    def _placement(self, files: ModelFiles, threads: int) -> Placement:
        """The holders of layers: workers, this machine's devices, or the processor alone."""
        request = self._request
        if request.workers:
            self._on_progress("Connecting to workers", 0.0)
            crew = CrewPlan.of(request.workers, files, threads)
            self._notes += crew.notes
            return crew
        wanted = CardRequest(
            request.gpu_layers, request.device, threads, request.draft_device, self._on_progress, self._notes
        )
        return placement_here(self._cards or open_cards(files, wanted), files, wanted, self._store)

    def _placed(
        self,
        placement: Placement,
        prints: list[Footprint],
        budget: int,
        drafter: InspectedModel | None = None,
    ) -> Placed:
        files = None if drafter is None else ModelFiles(drafter.headers)
        return placement.place(prints, budget, files, streams=self._request.streams, hits=self._hits)

    def _candidates(
        self,
        model: InspectedModel,
        costs: DraftCosts,
        pass_costs: PassCosts,
        placement: Placement,
        target: Footprint,
        budget: int,
        without_drafter: Placed,
    ) -> list[_Candidate]:
        """Plain decoding, and every drafter that there is room for."""

        def candidate(
            drafting: Drafting, placed: Placed, drafter: InspectedModel | None = None
        ) -> _Candidate:
            # Beside a drafter, a model may have to be streamed that fits without it.
            streams = placed.holding.streamed_bytes > 0
            exact = streams and placed.holding.experts is None
            padded = exact and not self._any_rows
            here, source = pass_costs.of_target(model, streams=streams, padded=padded)
            self._notes.append(source)
            if placed.holding.experts is not None:
                here = replace(here, overlap=_NO_OVERLAP)
            passes = placed.over(here)
            most = self._most_nodes(padded=padded, exact=exact)
            sizes = alternatives(placed.holding, passes, drafting, most)
            drawn = sizes if drafting.yields is None else sizes[1:]  # one node is plain decoding
            return _Candidate(drafting, placed, here, passes, most, drafter, tuple(drawn))

        found = [candidate(Drafting("none"), without_drafter)]
        for drafting, drafter in costs.of_drafters(self._request.draft, self._on_progress):
            if drafter is None:
                found.append(candidate(drafting, without_drafter))
                continue
            try:
                placed = self._placed(placement, [target, self._drafter(drafter)], budget, drafter)
            except MemoryLimitError:
                self._notes.append(f"There is no room for {drafting.name}.")
            else:
                found.append(candidate(costs.on_device(drafting, drafter, placed), placed, drafter))
        return found

    def _most_nodes(self, *, exact: bool, padded: bool) -> int:
        """Nodes of the largest tree."""
        if padded:
            return MOST_PADDED_ROWS
        return LARGE_NODES if exact else USUAL_NODES

    def _note_packing(self, files: ModelFiles, chosen: Prediction, way: _Candidate) -> None:
        """The bytes of the packed file, and what it gains."""
        layers = files.layers()
        if not gains_from_packing(layers):
            self._notes.append("Packing would gain nothing: no weight has a kernel layout of its own.")
            return
        unpacked = replace(way.passes, compute=way.passes.compute.scaled(_PLAIN_KERNELS))
        without = best(alternatives(chosen.holding, unpacked, way.drafting, way.most))
        size = sum(layer.n_bytes for layer in layers)
        self._notes.append(
            f"The packed file takes {readable(size)} of disk. Without it (--pack never): about "
            f"{without.tokens_per_second:.2f} tokens/s."
        )

    def _prompts(
        self, files: ModelFiles, placement: Placement, way: _Candidate, attend_s: float
    ) -> dict[int, PromptTime | None]:
        """The time to read prompts, each in a context that holds it, as loading would cut them.

        Args:
            attend_s: seconds in which a row attends to a cell.
        """
        beside = [] if way.drafter is None else [self._drafter(way.drafter)]
        most = files.headers[0].context_length
        found: dict[int, PromptTime | None] = {}
        for tokens in _PROMPTS:
            context = max(self._request.context, tokens + USUAL_TEXT)
            found[tokens] = None
            if most and tokens >= most:
                continue
            budget = way.placed.holding.budget
            rows, placed = MOST_PROMPT_ROWS, way.placed
            try:
                if context > self._request.context:
                    size = self._target(files, context=context)
                    placed = self._placed(placement, [size, *beside], budget, way.drafter)
                passes = placed.over(way.here)
                if placed.holding.streamed_bytes:
                    rows, placed = self._pieces(files, placement, beside, budget, passes, context)
            except MemoryLimitError:
                continue
            found[tokens] = predict_prompt(placed.holding, passes, tokens, rows, attend_s)
        return found

    def _pieces(
        self,
        files: ModelFiles,
        placement: Placement,
        beside: list[Footprint],
        budget: int,
        passes: Passes,
        context: int,
    ) -> tuple[int, Placed]:
        """The rows of the pieces in which loading would read prompts, and where weights are then.

        Raises:
            MemoryLimitError: there is no room.
        """
        differ = lengths_that_differ(user_cache_path("edgespec") / "rows", files.headers[0].fingerprint)
        smallest = self._placed(placement, [self._target(files, context=context), *beside], budget)
        found = {USUAL_NODES: smallest}
        for rows in streamed_counts(USUAL_NODES, context):
            if rows in differ and not self._any_rows:
                continue
            try:
                size = self._target(files, rows, context)
                found[rows] = self._placed(placement, [size, *beside], budget)
            except MemoryLimitError:
                break
        holdings = {rows: placed.holding for rows, placed in found.items()}
        rows = best_rows(holdings, passes, usual_prompt(context))
        return rows, found[rows]

    def _batch(self, files: ModelFiles, placement: Placement, plain: _Candidate) -> BatchPlan:
        """Many texts at once, without drafts: the speed for each number of them that there is room for."""
        alone = plain.placed.holding
        budget, streams = alone.budget, alone.streamed_bytes > 0
        request = self._request
        cells = TextCells(cell_bytes(files.headers[0], request.kv), min(USUAL_TEXT, request.context))
        one = self._target(files)
        sizes: list[BatchPrediction] = []
        for texts in SIZES:
            size = replace(one, cache=one.cache + (texts - 1) * cells.text_bytes)
            try:
                placed = self._placed(placement, [size], budget)
            except MemoryLimitError:
                break
            if sizes and placed.holding.streamed_bytes > 0 and not streams:
                break
            sizes.append(predict_batch(placed.holding, placed.over(plain.here), texts))
        least = alone.needed
        if streams:
            try:
                predict_memory([one], files, 0)
            except MemoryLimitError as error:
                least = error.least or least
        return BatchPlan(cells, 1 + cells.texts_in(budget - least), fewest_texts(sizes), sizes)

    def _target(self, files: ModelFiles, rows: int = USUAL_NODES, context: int | None = None) -> Footprint:
        """The footprint of the model, its adapters included."""
        size = self._footprint(files.headers[0], rows, self._request.kv, context)
        return replace(size, weights=files.tensor_bytes, buffers=size.buffers + self._adapter_bytes)

    def _drafter(self, model: InspectedModel) -> Footprint:
        return with_second_copy(self._footprint(model.headers[0]), ModelFiles(tuple(model.headers)))

    def _footprint(
        self, header: GGUFHeader, rows: int = USUAL_NODES, kv: str = "f16", context: int | None = None
    ) -> Footprint:
        cells = (context or self._request.context) + SPARE_CELLS
        return footprint(header, n_cells=cells, n_outputs=USUAL_NODES, n_rows=rows, kv=kv)

    def _more_memory(
        self, placement: Placement, target: Footprint, way: _Candidate
    ) -> list[tuple[str, PlannedMemory]]:
        """Half as much memory again, and enough for everything."""
        prints = [target] if way.drafter is None else [target, self._drafter(way.drafter)]
        holding = way.placed.holding
        if not holding.streamed_bytes:
            return []
        more = {}
        half = holding.budget // 2
        if holding.budget + half < holding.needed:
            more[f"{readable(half)} more memory"] = holding.budget + half
        short = holding.needed - holding.budget
        more[f"{readable(short)} more memory (all of it)"] = holding.needed
        return [
            (name, self._placed(placement, prints, budget, way.drafter).holding)
            for name, budget in more.items()
        ]
