"""The interface of a text's cache, for models with key-value cells and with a recurrent state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

from edgespec.models.llama.cache.chain_cache import ChainCache
from edgespec.models.llama.cache.tree_cache import BranchingCache
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context


class TextCache(Protocol):
    """A committed text with drafts at its end; see BranchingCache for what the methods do.

    After a call that raises anything, KeyboardInterrupt included, `recover` must be called next. It may leave
    less text than there was, but never a different one.
    """

    ordered: bool
    max_paths: int
    length: int
    compactions: int
    saves_parts: bool

    @property
    def open_paths(self) -> int: ...
    def open(self, paths: int) -> None: ...
    def append(self, batch: Batch, rows: int = 0) -> None: ...
    def try_branches(self, batch: Batch, rows: int = 0, certain: int = 0) -> None: ...
    def fork(self, path: int, new_path: int, length: int) -> None: ...
    def commit(self, path: int, n_tokens: int, used_paths: int, n_rows: int) -> None: ...
    def recover(self) -> None: ...
    def rewind(self, length: int) -> None: ...
    def settle(self, length: int) -> None: ...
    def compact(self) -> None: ...
    def clear(self) -> None: ...
    def save(self, start: int, end: int) -> ctypes.Array[ctypes.c_uint8]: ...
    def restore(self, state: ctypes.Array[ctypes.c_uint8], n_tokens: int) -> None: ...


def open_cache(context: Context, *, ordered: bool) -> TextCache:
    """The cache for the model: with branches if its layers keep cells, otherwise without."""
    if context.model.keeps_recurrent_state:
        return ChainCache(context)
    return BranchingCache(context, ordered=ordered)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two texts."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # the usual case, compared in C
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
