"""The number of threads: one per physical core, or more where measurements show that to be faster.

Two threads on one core share its arithmetic units. When weights come from memory, that seldom gains anything
and often loses, but on some processors it helps. So both are timed once for each model, and the result is
stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgespec.engine.target import Target
from edgespec.machine.contention import ContentionWatch
from edgespec.machine.cores import default_threads, thread_counts
from edgespec.measure.passes import time_pass
from edgespec.profiles.store import Key, ProfileStore, machine_identity

_ROWS = (1, 8, 32)
_ROUNDS = 2
_WORTH = 0.97  # more threads must take less than this share of the time
_PATIENCE_S = 6.0


def fastest(seconds: Mapping[int, Mapping[int, float]]) -> int:
    """The thread count with the fastest passes; of several that are about as fast, the smallest.

    Args:
        seconds: seconds of a pass, by threads and rows; with the same rows for all counts.

    Raises:
        ValueError: there is nothing to choose from.
    """
    if not seconds:
        raise ValueError("there is nothing to choose from")

    def geometric_mean(count: int) -> float:
        times = seconds[count].values()
        return math.exp(sum(math.log(max(s, 1e-9)) for s in times) / len(times))

    chosen = min(seconds)
    for count in sorted(seconds):
        if geometric_mean(count) < _WORTH * geometric_mean(chosen):
            chosen = count
    return chosen


def known_threads(fingerprint: str, store: ProfileStore) -> int:
    """Threads for a model: the number measured to be the fastest, or else one per physical core."""
    kept = store.threads(_key(fingerprint))
    return kept if kept in thread_counts() else default_threads()


def planned_threads(asked: int | None, fingerprint: str, store: ProfileStore) -> int:
    """Threads for a model: those asked for, or those that are known to be the fastest."""
    return asked or known_threads(fingerprint, store)


def choose_threads(
    target: Target, fingerprint: str, store: ProfileStore, counts: Sequence[int] | None = None
) -> int:
    """Threads for a loaded target, stored or measured now; its context uses them from now on.

    A measurement that other programs disturbed is not stored, and nothing is measured where passes take so
    long that users would notice.

    Raises:
        DecodeAborted: stopped from outside.
    """
    counts = thread_counts() if counts is None else counts
    chosen = store.threads(_key(fingerprint))
    if chosen not in counts:
        chosen = None
        if len(counts) > 1:
            watch = ContentionWatch(max(counts), computing=not target.model.weights.streamed_bytes)
            seconds = _measure(target, counts)
            if seconds:
                chosen = fastest(seconds)
                if not watch.disturbed:
                    store.put_threads(_key(fingerprint), chosen, seconds)
    if chosen is None:
        chosen = min(counts)
    target.context.set_threads(chosen)
    return chosen


def _measure(target: Target, counts: Iterable[int]) -> dict[int, dict[int, float]]:
    """The shortest pass by threads and rows, counts alternating; empty if passes take too long."""
    counts = list(counts)
    rows = [size for size in _ROWS if size <= target.max_nodes]
    tokens = list(range(100, 100 + 2 * max(_ROWS) + 32))
    tokens = [token % target.model.vocabulary.n_tokens for token in tokens]
    found: dict[int, dict[int, float]] = {count: {} for count in counts}
    try:
        target.context.set_threads(counts[0])
        time_pass(target, tokens, 1)  # the first one of all is slower
        taken, _ = time_pass(target, tokens, 1)
        if taken * len(rows) * len(counts) * _ROUNDS > _PATIENCE_S:
            return {}
        for _ in range(_ROUNDS):
            for count in counts:
                target.context.set_threads(count)
                for size in rows:
                    taken, waited = time_pass(target, tokens, size)
                    found[count][size] = min(found[count].get(size, math.inf), taken - waited)
    finally:
        target.rewind(0)
    return found


def _key(fingerprint: str) -> Key:
    identity: dict[str, Any] = machine_identity()
    return identity | {"model": fingerprint, "threads": "to choose from"}
