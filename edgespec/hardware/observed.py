"""What a run saw of the figures that its pair is planned with, kept for the next run.

A profile is made in a minute from little text, and of a disk that gives another speed tomorrow. Runs see
more: they move its figures, the more the longer they were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.generation import PassRecord
from edgespec.hardware.profiles import Keys, ProfileStore
from edgespec.hardware.stream_rate import StreamRate, streamed_bytes
from edgespec.speculation.yields import Yields
from edgespec.target import Target

_ENOUGH_PASSES = 4  # whose bytes tell how fast the disk is


@dataclass
class _Seen:
    """Passes with trees: how many, tokens that were accepted, and that were to be expected by the profile."""

    yields: Yields
    passes: int = 0
    accepted: float = 0.0
    expected: float = 0.0


class Observed:
    """The passes of one engine.

    Args:
        keys: what the pair's figures are kept under; None keeps nothing.
    """

    def __init__(self, keys: Keys | None, store: ProfileStore | None = None) -> None:
        self._keys = keys
        self._store = store or ProfileStore()
        self._seen: dict[float, _Seen | None] = {}

    def add(self, record: PassRecord, temperature: float) -> None:
        """Count a pass of a text that was sampled at this temperature."""
        if record.nodes < 2 or self._keys is None:
            return
        if temperature not in self._seen:
            yields = self._store.yields_at(self._keys, temperature)
            self._seen[temperature] = _Seen(yields) if yields is not None else None
        seen = self._seen[temperature]
        if seen is not None:
            seen.passes += 1
            seen.accepted += record.accepted
            seen.expected += seen.yields.at(record.nodes) - 1

    def forget(self) -> None:
        """Begin anew, as with a profile that was just made from these passes."""
        self._seen.clear()

    def keep(self, target: Target) -> None:
        """Move what is kept towards what was seen."""
        if self._keys is None:
            return
        self._keep_rate(target, self._keys)
        for temperature, seen in self._seen.items():
            key = self._keys.yields(temperature)
            known = self._store.yields(key)
            if seen is not None and seen.expected > 0 and known is not None:
                self._store.put(key, known.corrected(seen.accepted / seen.expected, seen.passes))
        self.forget()

    def _keep_rate(self, target: Target, keys: Keys) -> None:
        arriving = StreamRate(target, since_loading=True)
        if arriving.n_bytes < _ENOUGH_PASSES * streamed_bytes(target) or not arriving.n_bytes:
            return
        passes = self._store.passes(keys.passes)
        if passes is not None:
            self._store.put(keys.passes, replace(passes, read_rate=arriving.rate))
