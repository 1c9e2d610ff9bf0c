"""The choice of `--draft auto` among several drafters: the fastest by the measurements of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.costs.planner import Drafting, Passes, alternatives, best
from edgespec.errors import EdgeSpecError
from edgespec.loading.state import LoadState
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint, footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.drafter_choice import Candidate
from edgespec.offload.planning.budget import memory_room, predict_memory
from edgespec.offload.planning.needs import with_second_copy
from edgespec.profiles.store import Keys, ProfileStore

_ENOUGH = 32  # passes after which what trees yield is known well enough
_CLEARLY = 1.05  # times the speed, before another one than usual is taken


@dataclass(frozen=True)
class Choice:
    """The drafter to take, and why, as the end of a sentence."""

    candidate: Candidate
    reason: str


def choose_candidate(
    found: Sequence[Candidate], target: ModelFiles, state: LoadState, store: ProfileStore | None = None
) -> Choice:
    """The best of several candidates.

    Their order decides, unless runs have measured the draft steps and the accepted tokens of the first one
    and of another one that is clearly faster with this target.

    Args:
        found: at least one, the usual choice first.
        store: what was measured; None is that of this machine.
    """
    usual = Choice(found[0], found[0].reason)
    if len(found) < 2 or not state.config.speculation.learn:
        return usual
    speeds = _Speeds(target, state, store or ProfileStore())
    known = speeds.of(found[0])
    if known is None:
        return usual
    measured = [(speed, other) for other in found[1:] if (speed := speeds.of(other)) is not None]
    fastest, candidate = max(measured, key=lambda pair: pair[0], default=(0.0, found[0]))
    if not measured:
        return usual
    if fastest > _CLEARLY * known:
        slower = f"{known:.3g} with {found[0].path.name}"
        return Choice(candidate, f"with {fastest:.3g} tokens/s, and {slower}, by what was measured here")
    why = f"with {known:.3g} tokens/s by what was measured here, and no more with any other"
    return Choice(found[0], f"{usual.reason}, {why}")


class _Speeds:
    """Tokens per second that candidates give a target, by what was measured of them on this machine."""

    def __init__(self, target: ModelFiles, state: LoadState, store: ProfileStore) -> None:
        self._target = target
        self._state = state
        self._store = store
        self._header = target.headers[0]
        self._threads = state.config.devices.threads or known_threads(self._header.fingerprint, store)

    def of(self, candidate: Candidate) -> float | None:
        """The speed with the best size of trees; None if something of it was not measured."""
        try:
            header = read_header(candidate.path)
            drafter = with_second_copy(self._size(header), ModelFiles.of(header))
            sizes = [replace(self._size(self._header), weights=self._target.tensor_bytes), drafter]
            memory = self._state.config.memory
            room, streams = memory_room(memory.limit), memory.offload == "stream"
            holding = predict_memory(sizes, self._target, room, streams=streams)
        except EdgeSpecError:
            return None  # it cannot be read, or does not fit
        keys = Keys.of(self._header.fingerprint, header.fingerprint, threads=self._threads, mode="")
        steps, yields = self._store.drafts(keys.drafts), self._store.yields_at(keys, 0.0)
        passes = self._store.preferred_passes(
            self._header.fingerprint, self._threads, streams=holding.streamed_bytes > 0
        )
        if passes is None or (holding.streamed_bytes and not passes.read_rate):
            return None
        if steps is None or yields is None or yields.passes < _ENOUGH:
            return None
        drafting = Drafting(candidate.path.name, yields, steps.step, steps.overhead)
        known = Passes(passes.compute, passes.read_rate, passes.accept_s, passes.overlap)
        return best(alternatives(holding, known, drafting, USUAL_NODES)).tokens_per_second

    def _size(self, header: GGUFHeader) -> Footprint:
        return footprint(header, n_cells=self._state.n_cells, n_outputs=self._state.n_nodes)
