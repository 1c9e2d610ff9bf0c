"""The rows of a pass: long pieces of a prompt read weights less often, and take memory from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates, PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.prompts import best_rows
from edgespec.errors import MemoryLimitError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import MemoryNeeds, PairSizes
from edgespec.planning.memory.stream_layout import StreamLayout

_MAX_STREAMED_ROWS = 4096


@dataclass(frozen=True)
class PrefillFacts:
    """Facts, besides memory, by which prompts' pieces are sized."""

    passes: TargetPasses  # what the target's passes take, as far as that is known
    tokens: int  # of a usual prompt
    # whether EdgeSpec's own kernels are in use, so that exact passes may have any rows
    own_kernels: bool = False
    # rows that gave other bits than short passes, so that exact decoding will not use them
    unused: frozenset[int] = frozenset()


def streamed_needs(
    sizes: PairSizes,
    files: ModelFiles,
    budget: int,
    config: Config,
    prefill: PrefillFacts,
    *,
    devices: bool = False,
    sends: bool = False,
) -> MemoryNeeds:
    """The needs of target and drafter with the rows per pass that are the fastest where weights are streamed.

    Args:
        sizes: of the pair.
        files: the target's.
        devices: layers are on devices or other machines.
        sends: weights are sent to a device, so that decoding is not exact unless that is asked for.

    Raises:
        ModelFileError, MemoryLimitError: as PairSizes.
    """
    offload, exact = config.memory.offload, config.speculation.exact
    fewest = sizes.context.fewest_rows
    # Streamed models decode exactly by default, except for those whose experts are streamed one by one.
    alone = config.memory.experts != "never" and bool(layer_weights(files).experts)
    exact = offload != "mmap" and not alone and not sends if exact is None else exact
    if exact and (offload == "mmap" or devices):
        return sizes.at(fewest)  # only streamed weights allow long pieces in exact decoding
    skipped = prefill.unused if exact and not prefill.own_kernels else frozenset()
    counts = [n for n in (*sizes.rows, *_more_rows(sizes.rows[0], sizes.context.n_cells)) if n not in skipped]
    while True:
        holdings = _streamed(map(sizes.roughly_streamed, sorted({*counts, fewest})), files, budget, config)
        rows = best_rows(holdings, prefill.passes, prefill.tokens) if holdings else fewest
        if sizes.is_known(rows):
            return sizes.at(rows, streams=True)
        sizes.at(rows)  # the next round knows this size


def _more_rows(most: int, n_cells: int) -> list[int]:
    """The rows of pieces that are compared where weights are streamed, beyond these."""
    doubled = (most << n for n in range(1, _MAX_STREAMED_ROWS.bit_length()))
    return [rows for rows in doubled if rows <= min(_MAX_STREAMED_ROWS, n_cells)]


def _streamed(
    needs: Iterable[MemoryNeeds], files: ModelFiles, budget: int, config: Config
) -> dict[int, PlannedWeights]:
    """The places of streamed weights for each number of rows that there is room for."""
    found = {}
    for each in needs:
        try:
            found[each.rows] = StreamLayout.of(files, each, budget, config, HitRates()).holding
        except (MemoryLimitError, UnsupportedBuild):  # loading says what is wrong
            break
    return found
