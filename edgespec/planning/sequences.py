"""The number of sequences answered at once, and the cells that they take: planned before anything is loaded.

Cells take memory that weights could have. So the cache gets room for as many sequences as make passes worth
most, and no model that fits in memory is streamed for the sake of company. Where sequences turn out to be
longer, some wait for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from edgespec.base.units import readable
from edgespec.costs.batches import SIZES, SequenceCells, TextLengths, batch_speed, fewest_sequences
from edgespec.costs.planner import TargetPasses
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.footprint import USUAL_TEXT, cell_bytes
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.planning.plan import Plan, SequencePlan
from edgespec.planning.planner import Planner
from edgespec.speculation.noise import noise_bytes

_UNMEASURED = 16  # sequences, where it is not known what passes take
_SHARE = 1 / 8  # of a streamed model's budget for the cells of company, where it is not known what that gains
_SURE = 0.95  # of the budget: what is estimated to take no more fits


def plan_sequences(planner: Planner, drafter: ModelFiles | None) -> SequencePlan:
    """The number of sequences for which the options ask, and the cells that there is memory for."""
    config, target = planner.config, planner.target
    parallel = config.batching.parallel
    if parallel is None:
        return SequencePlan()
    asked = parallel if isinstance(parallel, int) else None
    if asked == 1 or _has_one_size(target):
        return SequencePlan(asked)
    cells = SequenceCells(
        cell_bytes(target.headers[0], config.model.kv)
        + (0 if drafter is None else cell_bytes(drafter.headers[0])),
        min(config.batching.text_tokens or USUAL_TEXT, config.model.context),
    )
    sizes = SIZES if asked is None else sorted({*(n for n in SIZES if n < asked), asked})
    possible = _possible(planner, drafter, cells, sizes)
    if not possible:  # there is no room for a single one; loading says what is missing
        return SequencePlan(asked)
    passes = planner.known_passes(streams=possible[1].streams)
    if passes is None:
        most = planner.budget * _SHARE
        possible = {
            sequences: plan
            for sequences, plan in possible.items()
            if not plan.streams or (sequences - 1) * cells.sequence_bytes <= most
        }
    sequences = _chosen(possible, passes, asked, TextLengths.of(cells.tokens))
    note = (
        f"A token takes {readable(cells.cell_bytes)} of cache, which has room for {sequences} texts of "
        f"{cells.tokens} tokens: {readable(sequences * cells.sequence_bytes)}."
    )
    return SequencePlan(asked or sequences, (sequences - 1) * cells.tokens, note)


def _possible(
    planner: Planner, drafter: ModelFiles | None, cells: SequenceCells, sizes: Sequence[int]
) -> dict[int, Plan]:
    """The plan for each number of sequences that there is room for."""
    noise = partial(noise_bytes, planner.target.headers[0].n_vocab, drafts=drafter is not None)
    alone = planner.needs(drafter)
    possible: dict[int, Plan] = {}
    for sequences in sizes:
        try:
            more = (sequences - 1) * cells.sequence_bytes + noise(answers=sequences) - noise(answers=1)
            plan = planner.place(_with_cells(alone, more), drafter)
        except MemoryLimitError:
            break
        sure = plan.holding.needed <= _SURE * plan.holding.budget
        if possible and not possible[1].streams and (plan.streams or not sure):
            break
        possible[sequences] = plan
    return possible


def _with_cells(needs: MemoryNeeds, n_bytes: int) -> MemoryNeeds:
    """The needs with more bytes beside weights: the target's, but the sum does not depend on that."""
    first, *others = needs.footprints
    return replace(needs, footprints=[replace(first, cache=first.cache + n_bytes), *others])


def _chosen(
    possible: Mapping[int, Plan], passes: TargetPasses | None, asked: int | None, text: TextLengths
) -> int:
    """Choose for how many sequences the cache gets cells."""
    most = max(possible)
    if passes is None:
        return most if asked is not None else min(most, _UNMEASURED)
    speeds = {
        sequences: batch_speed(plan.holding, plan.over(passes), sequences, text, plan.needs.rows)
        for sequences, plan in possible.items()
    }
    if asked is None:
        return fewest_sequences(speeds)
    if not possible[most].streams:
        return most  # cells for more sequences than are fast cost nothing
    return max(speeds, key=lambda sequences: speeds[sequences])


def _has_one_size(model: ModelFiles) -> bool:
    """True if more cells would be of no use, or change texts.

    Models with a recurrent state have one sequence at a time.
    """
    return model.headers[0].keeps_running_state or model.depends_on_context
