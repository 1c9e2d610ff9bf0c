"""Plan how a model would run here: in memory or streamed, with which drafter, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.config import Config
from edgespec.costs.batches import SIZES, BatchPrediction, SequenceCells, fewest_sequences, predict_batch
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import (
    DraftingCosts,
    PlanComparison,
    Prediction,
    TargetPasses,
    advise,
    alternatives,
    best,
)
from edgespec.costs.prompts import PromptTime, predict_prompt
from edgespec.errors import MemoryLimitError
from edgespec.loading.adapters import read_adapters, refuse_streaming
from edgespec.loading.devices.cards import Cards
from edgespec.loading.devices.finding import PlacementRequest, open_cards
from edgespec.loading.devices.machine import MachineSnapshot
from edgespec.loading.devices.workers import measure_workers, workers_in_words
from edgespec.loading.plan import Plan, Planner
from edgespec.loading.sequences import with_cells
from edgespec.loading.tree_sizes import usual_nodes
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import USUAL_TEXT, cell_bytes, require_cache_type
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import InspectedModel, inspect_model
from edgespec.models.llama.row_rule import MOST_PADDED_ROWS
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.planning.budget import least_budget
from edgespec.plans.draft_costs import DraftCosts
from edgespec.plans.pass_costs import NO_OVERLAP, PassCosts
from edgespec.plans.report import BatchPlan, PlanReport
from edgespec.profiles.store import ProfileStore
from edgespec.progress import Progress
from edgespec.units import readable

_PLAIN_KERNELS = 2.5  # how much longer arithmetic takes without packing: seen from 2.3 to 2.9
_PROMPTS = (1_000, 10_000, 50_000)  # tokens


def plan_for(
    config: Config,
    on_progress: Progress,
    store: ProfileStore | None = None,
    cards: Cards | None = None,
    *,
    temperature: float = 0.0,
) -> PlanReport:
    """The report on a model that is here, or for one on the Hub, of which only the header is read.

    Args:
        config: its memory limit may be more than the machine has, to see what that would give.
        cards: to plan for cards that are not here.

    Raises:
        EdgeSpecError: the model or the drafter cannot be found.
        MemoryLimitError: the memory is too small; says how much would do.
    """
    return _Planning(config, on_progress, store or ProfileStore(), cards, temperature).plan()


@dataclass(frozen=True)
class _Candidate:
    """Plain decoding or one drafter, where weights are beside it, and every tree size with it.

    Attributes:
        here: passes of the whole target on the processor.
        passes: of the target with its weights where they are.
        most: nodes that a tree may have.
    """

    drafting: DraftingCosts
    plan: Plan
    here: TargetPasses
    passes: TargetPasses
    most: int
    sizes: tuple[Prediction, ...]


class _Planning:
    """The steps of a report, with what they share."""

    def __init__(
        self,
        config: Config,
        on_progress: Progress,
        store: ProfileStore,
        cards: Cards | None,
        temperature: float,
    ) -> None:
        self._config = config
        self._temperature = temperature
        self._on_progress = on_progress
        self._store = store
        self._notes: list[str] = []
        self._cards = cards

    def plan(self) -> PlanReport:
        named = self._config.model
        model = inspect_model(named.name or str(catalog.find(None)), self._on_progress)
        header, files = model.headers[0], ModelFiles.of_headers(model.headers)
        self._notes += model.notes
        require_cache_type(named.kv, header)
        adapter_bytes = sum(a.header.file_bytes for a in read_adapters(named.lora, header))
        machine = self._machine(files)
        planner = Planner(files, self._config, machine, self._store, beside=adapter_bytes)
        pass_costs = PassCosts(self._store, machine.n_threads, self._on_progress)
        plan = planner.plan()
        if plan.streams:
            if named.lora:
                raise refuse_streaming()
            # What this measures decides how many rows a pass has.
            pass_costs.of_target(model, streams=True, padded=False)
            planner = replace(planner, usual_nodes=usual_nodes(planner))
            plan = planner.plan()
        draft_costs = DraftCosts(model, self._store, pass_costs, machine.n_threads, self._temperature)
        candidates = self._candidates(model, draft_costs, pass_costs, planner, plan)
        plain, *drafters = candidates
        comparison = PlanComparison(plain.sizes[0], tuple(candidate.sizes for candidate in drafters))
        chosen = comparison.fastest
        way = next(candidate for candidate in candidates if any(chosen is size for size in candidate.sizes))
        self._notes += way.plan.notes
        self._notes += [
            f"Tokens a pass with {candidate.drafting.name}: {candidate.drafting.source}."
            for candidate in drafters
            if candidate.sizes
        ]
        if plan.holding.experts is not None and not planner.hits.measured:
            self._notes.append(
                "How often experts are found in memory is assumed. Runs with this model measure it."
            )
        if way.plan.streams:
            self._note_packing(files, chosen, way)
        sure = way.passes.measured and (way.drafting.yields is None or way.drafting.measured)
        if chosen.holding.experts is not None:
            sure = sure and planner.hits.measured
        if not sure:
            self._notes.append(
                "Derived figures may be off by half: 'edgespec profile' with this model and drafter "
                "measures them."
            )
        return PlanReport(
            model=named.name or header.path.stem,
            comparison=comparison,
            advice=advise(chosen, way.passes, way.drafting, way.most, self._more_memory(planner, way)),
            batch=self._batch(planner, plain),
            kv=named.kv,
            cache_bytes=named.context * cell_bytes(header, named.kv),
            adapter_bytes=adapter_bytes,
            prompts=self._prompts(planner, way, pass_costs.attend_s(model)),
            notes=list(dict.fromkeys(self._notes)),
            uncertain=not sure,
        )

    def _machine(self, files: ModelFiles) -> MachineSnapshot:
        """Describe this machine, with the memory that was named if it has less, and the workers or cards."""
        devices, limit = self._config.devices, self._config.memory.limit
        threads = devices.threads or known_threads(files.headers[0].fingerprint, self._store)
        workers, cards = None, self._cards
        if devices.workers:
            self._on_progress("Connecting to workers", 0.0)
            workers = measure_workers(devices.workers, files, threads)
            self._notes += workers_in_words(workers, files)
        elif cards is None:
            cards = open_cards(files, PlacementRequest(devices, threads, self._on_progress, self._notes))
        machine = MachineSnapshot.read(threads, cards, workers)
        room = machine.free.budget()
        if limit is None or limit <= room:
            return machine
        self._notes.append(f"The plan is for {readable(limit)} of memory; {readable(room)} are free now.")
        return replace(machine, free=replace(machine.free, available=max(limit, machine.free.available)))

    def _candidates(
        self,
        model: InspectedModel,
        costs: DraftCosts,
        pass_costs: PassCosts,
        planner: Planner,
        without_drafter: Plan,
    ) -> list[_Candidate]:
        """Plain decoding, and every drafter that there is room for."""

        def candidate(drafting: DraftingCosts, plan: Plan) -> _Candidate:
            # Beside a drafter, a model may have to be streamed that fits without it.
            exact = plan.streams and plan.exact
            padded = exact and not plan.machine.own_kernels
            here, source = pass_costs.of_target(model, streams=plan.streams, padded=padded)
            self._notes.append(source)
            if plan.holding.experts is not None:
                here = replace(here, overlap=NO_OVERLAP)
            passes = plan.over(here)
            most = MOST_PADDED_ROWS if padded else plan.context.n_outputs
            sizes = alternatives(plan.holding, passes, drafting, most)
            drawn = sizes if drafting.yields is None else sizes[1:]  # one node is plain decoding
            return _Candidate(drafting, plan, here, passes, most, tuple(drawn))

        found = [candidate(DraftingCosts("none"), without_drafter)]
        for drafting, drafter in costs.of_drafters(self._config.speculation.draft, self._on_progress):
            if drafter is None:
                found.append(candidate(drafting, without_drafter))
                continue
            try:
                plan = planner.plan(drafter)
            except MemoryLimitError:
                self._notes.append(f"There is no room for {drafting.name}.")
            else:
                found.append(candidate(costs.on_device(drafting, drafter, plan), plan))
        return found

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

    def _prompts(self, planner: Planner, way: _Candidate, attend_s: float) -> dict[int, PromptTime | None]:
        """The time to read prompts, each in a context that holds it, as loading would cut them.

        Args:
            attend_s: seconds in which a row attends to a cell.
        """
        most = planner.target.headers[0].context_length
        found: dict[int, PromptTime | None] = {}
        for tokens in _PROMPTS:
            found[tokens] = None
            if most and tokens >= most:
                continue
            context = max(self._config.model.context, tokens + USUAL_TEXT)
            try:
                plan = replace(planner, config=self._config.with_(context=context)).plan(way.plan.drafter)
            except MemoryLimitError:
                continue
            passes, rows = plan.over(way.here), plan.needs.rows
            found[tokens] = predict_prompt(plan.holding, passes, tokens, rows, attend_s)
        return found

    def _batch(self, planner: Planner, plain: _Candidate) -> BatchPlan:
        """Plan many sequences at once, without drafts: the speed for each number that there is room for."""
        model, streams = self._config.model, plain.plan.streams
        cells = SequenceCells(cell_bytes(planner.target.headers[0], model.kv), min(USUAL_TEXT, model.context))
        one = planner.needs()
        sizes: list[BatchPrediction] = []
        for sequences in SIZES:
            try:
                plan = planner.place(with_cells(one, (sequences - 1) * cells.sequence_bytes))
            except MemoryLimitError:
                break
            if sizes and plan.streams and not streams:
                break
            sizes.append(predict_batch(plan.holding, plan.over(plain.here), sequences))
        budget = plain.plan.holding.budget
        least = least_budget(one, planner.target, self._config) if streams else plain.plan.holding.needed
        return BatchPlan(cells, 1 + cells.sequences_in(budget - least), fewest_sequences(sizes), sizes)

    def _more_memory(self, planner: Planner, way: _Candidate) -> list[tuple[str, PlannedWeights]]:
        """Half as much memory again, and enough for everything."""
        holding, plan = way.plan.holding, way.plan
        if not holding.streamed_bytes:
            return []
        more = {}
        half = holding.budget // 2
        if holding.budget + half < holding.needed:
            more[f"{readable(half)} more memory"] = holding.budget + half
        short = holding.needed - holding.budget
        more[f"{readable(short)} more memory (all of it)"] = holding.needed
        return [
            (name, planner.place(plan.needs, plan.drafter, budget=budget).holding)
            for name, budget in more.items()
        ]
