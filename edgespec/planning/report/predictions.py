"""The predictions of a plan: the ways to run, and prompts and batches, all from the decisions of a load."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from edgespec.config import AUTO, NONE
from edgespec.costs.batches import SIZES, SequenceCells, TextLengths, predict_batch
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import (
    DraftingCosts,
    PlanComparison,
    Prediction,
    TargetPasses,
    alternatives,
    best,
    possible_changes,
)
from edgespec.costs.prompts import PromptTime, predict_prompt
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.machine.disks import disk_of
from edgespec.models.gguf.footprint import USUAL_TEXT, cell_bytes
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.inspection import InspectedModel
from edgespec.offload.packing.division import divide
from edgespec.offload.packing.pack import gains_from_packing, piece_sizes
from edgespec.planning.adapters import refuse_streaming
from edgespec.planning.decision import Finder, decide
from edgespec.planning.exactness import max_nodes, pads_rows
from edgespec.planning.memory.stream_layout import streamable
from edgespec.planning.pack_folders import pack_folders
from edgespec.planning.plan import Plan, Planner
from edgespec.planning.report.draft_costs import DraftCosts
from edgespec.planning.report.memory_lines import memory_lines
from edgespec.planning.report.report import BatchPlan, PackFolder, PlanReport
from edgespec.planning.report.target_passes import PassCosts
from edgespec.planning.sequences import with_cells
from edgespec.progress import Progress
from edgespec.units import readable

_PLAIN_KERNELS = 2.5  # how much longer arithmetic takes without packing: seen from 2.3 to 2.9
_PROMPTS = (1_000, 10_000, 50_000)  # tokens


def report_on(
    model: InspectedModel,
    planner: Planner,
    find: Finder,
    on_progress: Progress,
    *,
    temperature: float = 0.0,
    notes: Sequence[str] = (),
) -> PlanReport:
    """The report on a model, on the machine of a planner; raises as `decide`.

    Args:
        find: finds the drafter of a load.
        notes: what is known already.
    """
    return _Planning(model, planner, on_progress, temperature, notes).report(find)


@dataclass(frozen=True)
class _Candidate:
    """Plain decoding or one drafter, where weights are beside it, and every tree size with it.

    Attributes:
        here: passes of the whole target on the processor.
        passes: of the target with its weights where they are.
        most: nodes that a tree may have.
        sizes: one node comes first: the drafter rests.
    """

    drafting: DraftingCosts
    plan: Plan
    here: TargetPasses
    passes: TargetPasses
    most: int
    sizes: tuple[Prediction, ...]

    @property
    def measured(self) -> bool:
        """True if all that the predictions rest on was measured with these models."""
        experts = self.plan.holding.experts
        return self.passes.measured and self.drafting.measured and (experts is None or experts.measured)


class _Planning:
    """The steps of a report, with what they share."""

    def __init__(
        self,
        model: InspectedModel,
        planner: Planner,
        on_progress: Progress,
        temperature: float,
        notes: Sequence[str],
    ) -> None:
        self._model = model
        self._planner = planner
        self._config = planner.config
        self._temperature = temperature
        self._notes = list(notes)
        self._pass_costs = PassCosts(planner.store, planner.machine.n_threads, on_progress, planner.disks)
        self._on_progress = on_progress

    def report(self, find: Finder) -> PlanReport:
        """Raise as `decide`."""
        model, pass_costs, planner, named = self._model, self._pass_costs, self._planner, self._config.model
        machine, header, files = planner.machine, self._model.headers[0], planner.target
        if files.tensor_bytes > planner.budget:  # what this measures decides how many rows a pass has
            pass_costs.of_target(model, streams=True, padded=False)
        decision = decide(planner, find)
        planner, plan = decision.planner, decision.plan
        if plan.streams and named.lora:
            raise refuse_streaming()
        draft_costs = DraftCosts(model, planner.store, pass_costs, machine.n_threads, self._temperature)
        draft = self._config.speculation.draft

        def candidate(drafting: DraftingCosts, plan: Plan) -> _Candidate:
            return self._candidate(draft_costs.on_device(drafting, plan), plan)

        way = candidate(draft_costs.of_load(plan.drafter, draft), plan)
        plain = candidate(DraftingCosts(NONE), plan if plan.drafter is None else planner.plan())
        self._notes += [*decision.notes, *plan.notes]
        others = [
            candidate(draft_costs.of_model(drafter), with_drafter)
            for drafter in (draft_costs.others(plan.drafter) if draft == AUTO else ())
            if (with_drafter := self._beside(planner, drafter)) is not None
        ]
        chosen = best(way.sizes)
        comparison = PlanComparison(
            way.sizes,
            plain.sizes[0],
            tuple(best(other.sizes[1:]) for other in others if other.sizes[1:]),
            possible_changes(
                chosen,
                way.passes,
                way.drafting,
                way.most,
                self._more_memory(planner, way),
                drafter_elsewhere=bool(plan.on_cards.drafter_name),
            ),
        )
        self._notes += [
            f"Tokens a pass with {each.drafting.name}: {each.drafting.source}."
            for each in (way, *others)
            if each.drafting.source
        ]
        if plan.holding.experts is not None and not planner.hits.measured:
            self._notes.append("The hit rate of experts is assumed. Running the model measures it.")
        if plan.streams and not plan.sends:
            self._note_packing(files, chosen, way)
        if doubt := header.doubt_about(named.context):
            self._notes.append(doubt)
        if not way.measured:
            self._notes.append(
                "Derived figures may be off by half: 'edgespec profile' with this model and drafter "
                "measures them."
            )
        return PlanReport(
            model=named.name or header.path.stem,
            comparison=comparison,
            batch=self._batch(planner, plain),
            drafter=way.drafting.name,
            exact=True if plan.exact else self._config.speculation.exact,
            threads=machine.n_threads,
            kv=named.kv,
            cache_bytes=named.context * cell_bytes(header, named.kv),
            adapter_bytes=planner.beside,
            memory=memory_lines(plan),
            pack_folders=self._pack_folders(plan),
            prompts=self._prompts(planner, way, pass_costs.attend_s(model)),
            notes=list(dict.fromkeys(self._notes)),
            uncertain=not way.measured,
            context=named.context,
            trained_context=header.context_length or 0,
        )

    def _pack_folders(self, plan: Plan) -> list[PackFolder]:
        """The bytes that each folder for packed layers would hold; notes say which cannot be used."""
        planner, layout = self._planner, plan.memory.layout
        if layout is None or not self._config.memory.pack_dir:
            return []
        always = self._config.memory.pack == "always"
        pack_folders(self._config, planner.store).usable(self._notes, in_memory=always, make=False)
        folders = planner.disks.folders
        if not folders:
            return []
        rates = planner.disks.rates(planner.store, self._on_progress)
        weights = streamable(planner.target, layout.config.memory.experts)
        shares = divide(piece_sizes(weights.layers, weights.experts), rates)
        return [
            PackFolder(str(folder), rate, share, disk_of(folder).free)
            for folder, rate, share in zip(folders, rates, shares, strict=True)
        ]

    def _candidate(self, drafting: DraftingCosts, plan: Plan) -> _Candidate:
        # Beside a drafter, a model may have to be streamed that fits without it.
        here, source = self._pass_costs.of_target(self._model, streams=plan.streams, padded=pads_rows(plan))
        self._notes.append(source)
        passes, most = plan.over(here), max_nodes(plan)
        sizes = alternatives(plan.holding, passes, drafting, most)
        return _Candidate(drafting, plan, here, passes, most, tuple(sizes))

    def _beside(self, planner: Planner, drafter: ModelFiles) -> Plan | None:
        """The plan with another drafter than a load would take; None if there is no room for it."""
        try:
            return replace(planner, measured=False).plan(drafter)
        except MemoryLimitError:
            self._notes.append(f"There is no room for the drafter {drafter.paths[0].name}.")
            return None

    def _note_packing(self, files: ModelFiles, chosen: Prediction, way: _Candidate) -> None:
        """The bytes of the packed file, and what it gains."""
        layers = files.layers()
        if not gains_from_packing(layers):
            self._notes.append("Packing would gain nothing: no weight has a packed kernel layout.")
            return
        unpacked = replace(way.passes, compute=way.passes.compute.scaled(_PLAIN_KERNELS))
        without = best(alternatives(chosen.holding, unpacked, way.drafting, way.most))
        size = sum(layer.n_bytes for layer in layers)
        self._notes.append(
            f"The packed file needs {readable(size)} of disk space. Without it (--pack never): about "
            f"{without.tokens_per_second:.2f} tokens/s."
        )

    def _prompts(self, planner: Planner, way: _Candidate, attend_s: float) -> dict[int, PromptTime | None]:
        """The time to read prompts, each in a context that holds it, as loading would cut them.

        Args:
            attend_s: seconds in which a row attends to a cell, all layers being on the processor.
        """
        most = planner.target.headers[0].context_length
        found: dict[int, PromptTime | None] = {}
        for tokens in _PROMPTS:
            found[tokens] = None
            if most and tokens >= most:
                continue
            context, plan = max(self._config.model.context, tokens + USUAL_TEXT), way.plan
            if context > self._config.model.context:
                larger = replace(planner, config=self._config.with_(context=context))
                try:
                    plan = larger.plan(plan.drafter)
                except (MemoryLimitError, BackendError):
                    continue
            passes, rows = plan.over(way.here), plan.needs.rows
            found[tokens] = predict_prompt(plan.holding, passes, tokens, rows, plan.attending(attend_s))
        return found

    def _batch(self, planner: Planner, plain: _Candidate) -> BatchPlan:
        """Plan many sequences at once, without drafts: the speed for each number that there is room for."""
        model = self._config.model
        cells = SequenceCells(cell_bytes(planner.target.headers[0], model.kv), min(USUAL_TEXT, model.context))
        streams = plain.plan.streams
        needs = plain.plan.needs, planner.needs()  # shorter pieces of prompts leave more memory

        def plan_of(sequences: int) -> Plan | None:
            """The plan with so many sequences; None if there is no room without streaming for their sake."""
            for each in needs:
                with suppress(MemoryLimitError, BackendError):
                    plan = planner.place(with_cells(each, (sequences - 1) * cells.sequence_bytes))
                    if streams or not plan.streams:
                        return plan
            return None

        text = TextLengths.of(cells.tokens)
        sizes = [predict_batch(plain.plan.holding, plain.passes, 1, text, plain.plan.needs.rows)]
        too_many = SIZES[-1] + plain.plan.memory.budget // max(cells.sequence_bytes, 1)
        for sequences in SIZES[1:]:
            plan = plan_of(sequences)
            if plan is None:
                too_many = sequences
                break
            passes, rows = plan.over(plain.here), plan.needs.rows
            sizes.append(predict_batch(plan.holding, passes, sequences, text, rows))
        known = sizes[-1].sequences
        most = known + bisect(range(known + 1, too_many), False, key=lambda n: plan_of(n) is None)
        return BatchPlan(cells, most, sizes)

    def _more_memory(self, planner: Planner, way: _Candidate) -> list[tuple[str, PlannedWeights]]:
        """Half as much memory again, and enough for everything."""
        holding, plan = way.plan.holding, way.plan
        if (
            not holding.streamed_bytes or holding.budget >= holding.needed
        ):  # streamed because that was asked for
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
