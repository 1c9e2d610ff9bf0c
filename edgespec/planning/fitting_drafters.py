"""The drafters on this machine that are small enough for a target and its memory."""

from __future__ import annotations

from edgespec.errors import EdgeSpecError
from edgespec.heads.families import drafter_files
from edgespec.models.gguf.footprint import USUAL_NODES, footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.drafter_choice import DrafterCandidate, candidates


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
