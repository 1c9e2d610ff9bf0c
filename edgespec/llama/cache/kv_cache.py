"""A sequence's cache, for models with key-value cells and with a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.llama.cache.chain_cache import ChainCache
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.state_cache import StateCache, TreeRows
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context

_COMPARED = 256  # tokens that are compared at once, in C

KVCache = BranchingCache | ChainCache | StateCache
"""A committed sequence with drafts at its end; see BranchingCache for what the methods do.

After a call that raises anything, KeyboardInterrupt included, `recover` must be called next. It may leave
less sequence than there was, but never a different one.
"""


def open_cache(context: Context, *, ordered: bool) -> KVCache:
    """The cache for the model: with branches if its layers keep cells, or their states can branch here."""
    if context.branches:
        return StateCache(context, ordered=ordered)
    if context.keeps_recurrent_state:
        return ChainCache(context)
    return BranchingCache(SharedCells(context, ordered=ordered))


def open_beside(cache: KVCache) -> KVCache:
    """The cache of another sequence in the same cells.

    Raises:
        ValueError: there is no room for another sequence.
    """
    if not isinstance(cache, BranchingCache):
        raise ValueError("recurrent states take one text at a time")
    return cache.another()


def close_all_but(known: Sequence[KVCache]) -> None:
    """Close all other sequences that share cells with these: an interrupted call can leave some."""
    first, kept = known[0], {id(cache) for cache in known}
    if isinstance(first, BranchingCache):
        for sequence in tuple(first.cells.holders):
            if id(sequence) not in kept:
                first.cells.drop(sequence)


def inherit(cache: KVCache, source: KVCache, length: int) -> None:
    """Make an empty sequence share the first `length` cells of another."""
    assert isinstance(cache, BranchingCache)
    assert isinstance(source, BranchingCache)
    cache.inherit(source, length)


def cut(cache: KVCache, start: int, end: int) -> bool:
    """Take tokens start .. end - 1 out of a sequence; what follows moves up.

    Returns:
        False if that cannot be done, and nothing has changed.
    """
    return isinstance(cache, BranchingCache) and cache.cut(start, end)


def decode_together(parts: Sequence[tuple[KVCache, TokenBatch]], rows: int, certain: int) -> None:
    """Decode rows after the committed sequences of several caches in one pass.

    Args:
        parts: caches that share their cells, and the rows of each.
        rows: pad the pass to this many rows.
        certain: leading rows that will be kept in any case, if there is a single sequence.
    """
    if len(parts) == 1:
        ((cache, batch),) = parts
        cache.try_branches(batch, rows, certain)
        return
    branching = [(cache, batch) for cache, batch in parts if isinstance(cache, BranchingCache)]
    assert len(branching) == len(parts), "recurrent states take one text at a time"
    cells = branching[0][0].cells
    cells.decode(branching, rows)
    for cache, batch in branching:
        cells.keep_branches(cache, batch)


def placement(cache: KVCache) -> TreeRows | None:
    """Return the place in the pass of the rows that a cache tried last; None if none was moved."""
    return cache.placement if isinstance(cache, StateCache) else None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two sequences, which may be of different types."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, _COMPARED):
        end = min(start + _COMPARED, shorter)
        if a[start:end] != b[start:end]:  # as a list and a tuple always are
            differing = next((i for i in range(start, end) if a[i] != b[i]), None)
            if differing is not None:
                return differing
    return shorter
