"""The choice of `--draft auto` among several drafters: the fastest by the measurements of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.costs.planner import Drafting, alternatives, best
from edgespec.errors import EdgeSpecError
from edgespec.loading.plan import Planner
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.drafter_choice import Candidate
from edgespec.profiles.store import Keys

_ENOUGH = 32  # passes after which what trees yield is known well enough
_CLEARLY = 1.05  # times the speed, before another one than usual is taken


@dataclass(frozen=True)
class Choice:
    """The drafter to take, and why, as the end of a sentence."""

    candidate: Candidate
    reason: str


def choose_candidate(found: Sequence[Candidate], planner: Planner) -> Choice:
    """The best of several candidates.

    Their order decides, unless runs have measured the draft steps and the accepted tokens of the first one
    and of another one that is clearly faster with this target.

    Args:
        found: at least one, the usual choice first.
    """
    usual = Choice(found[0], found[0].reason)
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
        slower = f"{known:.3g} with {found[0].path.name}"
        return Choice(candidate, f"with {fastest:.3g} tokens/s, and {slower}, by what was measured here")
    why = f"with {known:.3g} tokens/s by what was measured here, and no more with any other"
    return Choice(found[0], f"{usual.reason}, {why}")


def _speed(candidate: Candidate, planner: Planner) -> float | None:
    """Tokens per second with the best size of trees; None if something of it was not measured."""
    try:
        drafter = ModelFiles.of(read_header(candidate.path))
        plan = planner.plan(drafter)
    except EdgeSpecError:
        return None  # it cannot be read, or does not fit
    target = planner.target.headers[0].fingerprint
    keys = Keys.of(target, drafter.headers[0].fingerprint, threads=planner.threads, mode="")
    steps, yields = planner.store.drafts(keys.drafts), planner.store.yields_at(keys, 0.0)
    passes = planner.known_passes(streams=plan.streams)
    if passes is None or steps is None or yields is None or yields.passes < _ENOUGH:
        return None
    drafting = Drafting(candidate.path.name, yields, steps.step, steps.overhead)
    return best(alternatives(plan.holding, plan.over(passes), drafting, USUAL_NODES)).tokens_per_second
