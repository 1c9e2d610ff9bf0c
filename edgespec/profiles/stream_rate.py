"""The rate at which streamed weights arrive from disk."""

from __future__ import annotations

from edgespec.llama.runtime.weight_store import WeightStore


class StreamRate:
    """Measures how fast a model's weights arrive, from now on or since loading."""

    def __init__(self, weights: WeightStore, *, since_loading: bool = False) -> None:
        self._weights = weights
        self._bytes, self._seconds = (0, 0.0) if since_loading else (weights.read_bytes, weights.reading_s)

    @property
    def n_bytes(self) -> int:
        """Bytes that have arrived; 0 if nothing is streamed."""
        return self._weights.read_bytes - self._bytes if self._weights.streamed_bytes else 0

    @property
    def rate(self) -> float:
        """Bytes per second of the time in which reads were under way; 0 if there were none."""
        return self.n_bytes / (self._weights.reading_s - self._seconds) if self.n_bytes > 0 else 0.0
