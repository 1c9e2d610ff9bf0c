"""The drafter of a load: the one that was named, or the choice of `--draft auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.base.option import named
from edgespec.base.progress import Progress
from edgespec.base.units import readable_rate
from edgespec.costs.planner import alternatives, best
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.heads.families import drafter_files
from edgespec.heads.mtp import mtp_fault
from edgespec.models.gguf.footprint import USUAL_NODES, footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import FAMILY, DrafterCandidate, candidates
from edgespec.models.hub.registry import PairRegistry
from edgespec.planning.files import read_drafter, read_mtp
from edgespec.planning.planner import Planner
from edgespec.planning.tree_sizes import known_drafting

_ENOUGH = 32  # passes after which what trees yield is known well enough
_CLEARLY = 1.05  # times the speed, before another one than usual is taken


@dataclass(frozen=True)
class FoundDrafter:
    files: ModelFiles | None = None  # None if it is no model
    notes: tuple[str, ...] = ()  # why it is taken, or another one is not
    named: bool = False  # whether it was asked for; one that was not is left out where it has no room


def find_drafter(planner: Planner, on_progress: Progress) -> FoundDrafter:
    """The drafter for the options of a load.

    Raises:
        UsageError: the kind of drafter and its name contradict each other, or no drafter is known.
        ModelFileError, HubError: the drafter cannot be read or downloaded.
        PairingError, BackendError: it is a head; see `read_drafter`.
    """
    speculation, target = planner.config.speculation, planner.target
    speculation.check_drafter()
    if speculation.uses_mtp:
        return FoundDrafter(read_mtp(target), named=True)
    if speculation.names_a_model:
        path = catalog.find(speculation.draft, on_progress)
        return FoundDrafter(read_drafter(path, target), named=True)
    searched = speculation.draft == "auto" and speculation.may_use_a_model
    return _best_drafter(planner) if searched else FoundDrafter()


def _best_drafter(planner: Planner) -> FoundDrafter:
    """The best drafter on this machine for the target, and a note that says which.

    A drafter that a person has registered or made comes before the target's own layers. These come before
    models of the same family.
    """
    target, context = planner.target, planner.context
    notes = [
        f"The drafter {gone.path} of this target no longer exists. "
        f"'edgespec models remove {gone.path}' forgets it."
        for gone in PairRegistry().missing(target.headers[0].fingerprint)
    ]
    found = drafters_that_fit(
        target, budget=planner.budget, n_cells=context.n_cells, n_outputs=context.n_outputs
    )
    if all(candidate.kind == FAMILY for candidate in found) and (layers := _own_layers(planner, notes)):
        return FoundDrafter(layers, (*notes, "Drafting with the target's own MTP layer."))
    if found:
        choice = choose_candidate(found, planner)
        notes.append(f"Drafting with {choice.candidate.path.name}, {choice.reason}.")
        return FoundDrafter(read_drafter(choice.candidate.path, target), tuple(notes))
    if planner.config.speculation.kind is not None:
        raise UsageError(
            "No drafter for this target.",
            f"Name one with {named('draft', 'PATH')}, or make one: edgespec draft make TARGET",
        )
    return FoundDrafter(None, tuple(notes))


def _own_layers(planner: Planner, notes: list[str]) -> MTPLayers | None:
    """The target's own layers for further tokens, if they can draft and leave its weights where they are."""
    target = planner.target
    if mtp_fault(target):
        return None
    try:
        layers = read_mtp(target)
        if not planner.plan(layers).streams or planner.plan().streams:
            return layers
        why = "there is no memory for it without streaming weights"
    except EdgeSpecError as error:
        why = error.what.rstrip(".")
    notes.append(f"The target's own MTP layer does not draft: {why}.")
    return None


@dataclass(frozen=True)
class DrafterChoice:
    """The drafter to take, and why, as the end of a sentence."""

    candidate: DrafterCandidate
    reason: str


def choose_candidate(found: Sequence[DrafterCandidate], planner: Planner) -> DrafterChoice:
    """The best of several candidates.

    Their order decides, unless runs have measured the draft steps and the accepted tokens of the first one
    and of another one that is clearly faster with this target.

    Args:
        found: at least one, the usual choice first.
    """
    usual = DrafterChoice(found[0], found[0].reason)
    if len(found) < 2 or not planner.config.speculation.learn:
        return usual
    known = _speed(found[0], planner)
    if known is None:
        return usual
    measured = [(speed, other) for other in found[1:] if (speed := _speed(other, planner)) is not None]
    fastest, candidate = max(measured, key=lambda pair: pair[0], default=(0.0, found[0]))
    if not measured:
        return usual
    if fastest > _CLEARLY * known:
        slower = f"{readable_rate(known)} with {found[0].path.name}"
        return DrafterChoice(candidate, f"with {readable_rate(fastest)}, and {slower}, measured here")
    why = f"with {readable_rate(known)} measured here, and no faster with any other"
    return DrafterChoice(found[0], f"{usual.reason}, {why}")


def _speed(candidate: DrafterCandidate, planner: Planner) -> float | None:
    """Tokens per second with the best size of trees; None if something of it was not measured."""
    try:
        drafter = drafter_files(read_header(candidate.path))
        plan = planner.plan(drafter)
    except EdgeSpecError:
        return None  # it cannot be read, or does not fit
    passes = planner.known_passes(streams=plan.streams)
    drafting = known_drafting(planner, drafter, least_passes=_ENOUGH)
    if passes is None or drafting is None:
        return None
    return best(alternatives(plan.holding, plan.over(passes), drafting, USUAL_NODES)).tokens_per_second


def drafter_to_take(
    target: ModelFiles, *, budget: int, n_cells: int, n_outputs: int = USUAL_NODES
) -> DrafterCandidate | None:
    """The choice of `--draft auto` where nothing was measured: the first of `drafters_that_fit`."""
    found = drafters_that_fit(target, budget=budget, n_cells=n_cells, n_outputs=n_outputs)
    return found[0] if found else None


def drafters_that_fit(
    target: ModelFiles, *, budget: int, n_cells: int, n_outputs: int = USUAL_NODES
) -> list[DrafterCandidate]:
    """The candidates that are small compared with the target and the budget, the usual choice first.

    Args:
        budget: bytes of memory for target and drafter together.
        n_cells, n_outputs: of the drafter's context; see `footprint`.
    """
    found = []
    for candidate in candidates(target.headers[0]):
        try:
            files = drafter_files(read_header(candidate.path))
            small = footprint(files, n_cells=n_cells, n_outputs=n_outputs)
        except EdgeSpecError:
            continue  # it cannot be read
        if small.weights < target.tensor_bytes and small.total < budget / 2:
            found.append(candidate)
    return found
