"""A cache of what was used last, limited by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LatestValues(Generic[V]):
    """Values by key, of which those that were used least recently are dropped; any thread may use them.

    Args:
        max_bytes: limit of all values together; the latest is kept in any case.
        max_values: limit of their number; None for none.
    """

    def __init__(self, max_bytes: int, max_values: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._n_bytes = 0
        # A tracer's exception as a block ends leaves the lock held; its thread must not wait for itself then.
        self._lock = threading.RLock()

    def get(self, key: Hashable) -> V | None:
        """The value of that key; None if it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def values(self) -> list[V]:
        """All values, those that were used last at the end."""
        with self._lock:
            return [value for value, _ in self._kept.values()]

    def put(self, key: Hashable, value: V, n_bytes: int) -> None:
        """Keep a value that takes so many bytes."""
        with self._lock:
            self._drop(key)
            while self._kept and self._is_full(n_bytes):
                self._drop(next(iter(self._kept)))
            self._kept[key] = value, n_bytes
            self._n_bytes += n_bytes

    def remove(self, key: Hashable) -> None:
        """Drop the value of that key, if there is one."""
        with self._lock:
            self._drop(key)

    def _is_full(self, more_bytes: int) -> bool:
        too_many = self._max_values is not None and len(self._kept) >= self._max_values
        return too_many or self._n_bytes + more_bytes > self._max_bytes

    def _drop(self, key: Hashable) -> None:
        _, n_bytes = self._kept.pop(key, (None, 0))
        self._n_bytes -= n_bytes
