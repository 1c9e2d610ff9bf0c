"""The predictions of a plan, all from the decisions of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.config import NONE
from edgespec.costs.planner import DraftingCosts, Prediction, TargetPasses, alternatives
from edgespec.costs.yields import on_code
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.models.gguf.footprint import cell_bytes
from edgespec.models.hub.inspection import InspectedModel
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.planning.adapters import refuse_streaming
from edgespec.planning.decision import Finder, decide
from edgespec.planning.pack_folders import pack_folders
from edgespec.planning.plan import Plan, max_nodes, pads_rows
from edgespec.planning.planner import Planner
from edgespec.planning.report.draft_costs import DraftCosts
from edgespec.planning.report.memory_lines import memory_lines
from edgespec.planning.report.report import PlanReport
from edgespec.planning.report.target_passes import PassCosts


def report_on(
    model: InspectedModel,
    planner: Planner,
    find: Finder,
    on_progress: Progress,
    *,
    temperature: float = 0.0,
    notes: Sequence[str] = (),
    derived: DerivedPasses | None = None,
) -> PlanReport:
    """The report on a model, on the machine of a planner; raises as `decide`.

    Args:
        find: finds the drafter of a load.
        notes: what is known already.
        derived: shared by several reports, so that they can be compared.
    """
    config, header, threads = planner.config, model.headers[0], planner.machine.n_threads
    pass_costs = PassCosts(planner.store, threads, on_progress, planner.disks, derived)
    if planner.target.tensor_bytes > planner.budget:  # what this measures decides how many rows a pass has
        pass_costs.of_target(model, streams=True, padded=False)
    decision = decide(planner, find)
    planner, plan = decision.planner, decision.plan
    if plan.streams and config.model.lora:
        raise refuse_streaming()
    draft_costs = DraftCosts(model, planner.store, pass_costs, threads, temperature)
    drafting = draft_costs.on_device(draft_costs.of_load(plan.drafter, config.speculation.draft), plan)
    passes, source = _passes(model, plan, pass_costs)
    alone = plan if plan.drafter is None else planner.plan()
    alone_passes, alone_source = _passes(model, alone, pass_costs)
    experts = plan.holding.experts
    measured = passes.measured and drafting.measured and (experts is None or experts.measured)
    said = [*notes, *decision.notes, *plan.notes, source, alone_source]
    if drafting.source:
        said.append(f"Tokens a pass with {drafting.name}: {drafting.source}.")
    if experts is not None and not planner.hits.measured:
        said.append("The hit rate of experts is assumed. Running the model measures it.")
    if plan.streams and not plan.sends and config.memory.pack != "never":
        layers = planner.target.layers()
        if gains_from_packing(layers):
            size = readable(sum(layer.n_bytes for layer in layers))
            said.append(f"The packed file needs {size} of disk space.")
    if doubt := header.doubt_about(config.model.context):
        said.append(doubt)
    if not measured:
        said.append("Derived figures may be off by half: 'edgespec profile' with this pair measures them.")
    if plan.memory.layout is not None and config.memory.pack_dir:  # says which folders cannot be used
        pack_folders(config, planner.store).usable(said, in_memory=config.memory.pack == "always", make=False)
    code = drafting if drafting.yields is None else replace(drafting, yields=on_code(drafting.yields))
    return PlanReport(
        model=config.model.name or header.path.stem,
        plain=_sizes(alone, alone_passes, DraftingCosts(NONE))[0],
        sizes=_sizes(plan, passes, drafting),
        code_sizes=_sizes(plan, passes, code),
        drafter=drafting.name,
        exact=True if plan.exact else config.speculation.exact,
        threads=threads,
        kv=config.model.kv,
        cache_bytes=config.model.context * cell_bytes(header, config.model.kv),
        adapter_bytes=planner.beside,
        memory=memory_lines(plan),
        notes=list(dict.fromkeys(said)),
        uncertain=not measured,
        context=config.model.context,
    )


def _passes(model: InspectedModel, plan: Plan, costs: PassCosts) -> tuple[TargetPasses, str]:
    """The target's passes with its weights where a plan has them, and where the figures come from."""
    # Beside a drafter, a model may have to be streamed that fits without it.
    here, source = costs.of_target(model, streams=plan.streams, padded=pads_rows(plan))
    return plan.over(here), source


def _sizes(plan: Plan, passes: TargetPasses, drafting: DraftingCosts) -> tuple[Prediction, ...]:
    return tuple(alternatives(plan.holding, passes, drafting, max_nodes(plan)))
