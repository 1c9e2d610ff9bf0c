"""The decisions of a load, in order: the drafter, the size of trees, the number of sequences, the memory.

`load` carries them out, and `edgespec plan` reports them. A refusal names a size of memory that suffices,
found by the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.base.option import named
from edgespec.base.units import readable, rounded_up
from edgespec.config import LOOKUP
from edgespec.errors import EdgeSpecError, MemoryLimitError
from edgespec.machine.memory import PROCESS_BYTES
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.planning.drafter import FoundDrafter
from edgespec.planning.memory.needs import measured_process_bytes
from edgespec.planning.plan import Plan, SequencePlan
from edgespec.planning.planner import Planner
from edgespec.planning.sequences import plan_sequences
from edgespec.planning.tree_sizes import usual_nodes

_MAX_TRIALS = 40

Finder = Callable[[Planner], FoundDrafter]


@dataclass(frozen=True)
class Decision:
    planner: Planner  # with the sizes that were decided, for plans of the same model
    plan: Plan
    notes: tuple[str, ...] = ()  # why this drafter is taken

    def with_less_on_cards(self) -> Decision:
        """The decision with less on cards, after these have run out of memory; raises as `decide`."""
        planner = self.planner
        planner = replace(planner, machine=planner.machine.with_less_on_cards(self.plan.on_cards))
        return replace(self, planner=planner, plan=_plan_with_sequences(planner, self.plan.drafter))

    @property
    def read_share_alone(self) -> float:
        """The share of a pass's reads that would remain if the drafter's memory held weights."""
        plan = self.plan
        streamed = plan.holding.streamed_bytes
        if plan.holding.experts is not None or not streamed:
            return 1.0
        _, *drafters = plan.on_cards.left(plan.needs).footprints
        return max(1 - sum(size.total - size.tables for size in drafters) / streamed, 0.0)


def decide(planner: Planner, find: Finder) -> Decision:
    """Decide how the target of a planner is loaded.

    Args:
        planner: for contexts that are about to be loaded, or of a model that is not here.
        find: finds the drafter; raises as `files.find_drafter`.

    Raises:
        MemoryLimitError: the memory is too small; names a size with which the same call succeeds.
        BackendError, ModelFileError: as `Planner.plan`.
    """
    try:
        return _decide(planner, find)
    except MemoryLimitError as error:
        if error.least is None:
            raise
        raise _with_minimum(error, planner, find) from error


def _plan_with_sequences(planner: Planner, drafter: ModelFiles | None) -> Plan:
    """The plan with cells for several sequences; or for a single one, if what was estimated does not fit."""
    sequences = planner.sequences
    try:
        plan = planner.plan(drafter)
    except MemoryLimitError:
        if not sequences.more_cells:
            raise
        return replace(planner, sequences=SequencePlan(sequences.sequences)).plan(drafter)
    return replace(plan, notes=(*plan.notes, sequences.note)) if sequences.note else plan


def _decide(planner: Planner, find: Finder) -> Decision:
    estimated = replace(planner, measured=False)  # choices between many plans are not worth dry runs
    found = find(estimated)
    try:
        return _with_drafter(planner, estimated, found.files, found.notes)
    except MemoryLimitError:
        if found.files is None or found.named:
            raise
        name = found.files.paths[0].name
        return _with_drafter(planner, estimated, None, (f"There is no room for the drafter {name}.",))


def _with_drafter(
    planner: Planner, estimated: Planner, drafter: ModelFiles | None, notes: tuple[str, ...]
) -> Decision:
    nodes = usual_nodes(estimated, drafter)
    try:
        return _with_nodes(nodes, planner, estimated, drafter, notes)
    except MemoryLimitError:  # what was estimated to fit does not
        if nodes == USUAL_NODES:
            raise
        return _with_nodes(USUAL_NODES, planner, estimated, drafter, notes)


def _with_nodes(
    nodes: int, planner: Planner, estimated: Planner, drafter: ModelFiles | None, notes: tuple[str, ...]
) -> Decision:
    sequences = plan_sequences(replace(estimated, usual_nodes=nodes), drafter)
    planner = replace(planner, usual_nodes=nodes, sequences=sequences)
    return Decision(planner, _plan_with_sequences(planner, drafter), notes)


def _with_minimum(error: MemoryLimitError, planner: Planner, find: Finder) -> MemoryLimitError:
    """The error with the smallest memory that suffices, and a size to name that suffices in any program."""
    least, error = _smallest(planner, find, error, lambda n_bytes: n_bytes)
    if least is None:
        return error
    spare = PROCESS_BYTES - measured_process_bytes() if planner.measured else 0
    usual = replace(planner, process_bytes=PROCESS_BYTES)
    size, _ = _smallest(usual, find, MemoryLimitError("", least=least + spare), rounded_up)
    name, context = planner.target.paths[0].name, planner.config.model.context
    had = f"there are {readable(planner.budget)}" + (" in the budget" if planner.config.memory.limit else "")
    if lent := planner.machine.lent_bytes:
        had += f"; the workers lend {readable(lent)}"
    needed, hint = [f"a context of {context} tokens"], error.hint
    if planner.projector is not None:
        needed.insert(0, f"the projector {planner.projector.name}")
    if drafter := _named_drafter(planner, find):
        needed.insert(0, drafter)
        alone = _smallest_alone(usual)
        if alone is not None and alone < (size or least):
            remedy = f"Without the drafter, {readable(alone)} are enough: {named('draft', LOOKUP)}."
            hint = f"{remedy} {hint}".rstrip()
    *first, last = needed
    all_of_it = f"{', '.join(first)} and {last}" if first else last
    what = f"{name} with {all_of_it} needs {readable(size or least)} of memory, and {had}."
    return MemoryLimitError(what, hint, least=least)


def _named_drafter(planner: Planner, find: Finder) -> str:
    """The drafter that was asked for, in words; empty if none was."""
    found = find(replace(planner, measured=False))
    if found.files is None or not found.named:
        return ""
    if isinstance(found.files, MTPLayers):
        return "its MTP layer"
    return f"the drafter {found.files.paths[0].name}"


def _smallest_alone(planner: Planner) -> int | None:
    """A size of memory that suffices without a model that drafts; None if there is none."""
    try:
        config = planner.config.with_(draft=LOOKUP)
        config.speculation.check_drafter()
    except EdgeSpecError:
        return None  # another option needs a drafter
    planner = replace(planner, config=config)
    size, _ = _smallest(planner, lambda _: FoundDrafter(), MemoryLimitError("", least=1), rounded_up)
    return size


def _smallest(
    planner: Planner, find: Finder, error: MemoryLimitError, usual: Callable[[int], int]
) -> tuple[int | None, MemoryLimitError]:
    """The smallest memory with which the decisions succeed, and the last failure with less.

    Args:
        error: the first failure, which says what is needed at least.
        usual: the next size that may be tried.

    Returns:
        No size if more memory does not help.
    """
    size = 0
    for _ in range(_MAX_TRIALS):
        if error.least is None:
            break
        size = usual(max(error.least, size + 1))
        free = planner.machine.free
        machine = replace(planner.machine, free=replace(free, available=max(size, free.available)))
        trial = replace(planner, config=planner.config.with_(memory=size), machine=machine)
        try:
            _decide(trial, find)
        except MemoryLimitError as failure:
            error = failure
        except EdgeSpecError:
            break
        else:
            return size, error
    return None, error
