"""How fast streamed weights arrive."""

from __future__ import annotations

from edgespec.engine.target import Target


def streamed_bytes(target: Target) -> int:
    """Bytes that a pass reads from disk."""
    return int(getattr(target.model.weights, "streamed_bytes", 0))


class StreamRate:
    """How fast a target's weights come from disk, from now on or since loading."""

    def __init__(self, target: Target, *, since_loading: bool = False) -> None:
        self._weights = target.model.weights
        self._bytes, self._seconds = (0, 0.0) if since_loading else self._read()

    @property
    def n_bytes(self) -> int:
        """Bytes that came; 0 if nothing is streamed."""
        return self._read()[0] - self._bytes

    @property
    def rate(self) -> float:
        """Bytes a second while any were on their way; 0 if none were."""
        n_bytes, seconds = self._read()
        return (n_bytes - self._bytes) / (seconds - self._seconds) if n_bytes > self._bytes else 0.0

    def _read(self) -> tuple[int, float]:
        if not getattr(self._weights, "streamed_bytes", 0):
            return 0, 0.0
        return int(getattr(self._weights, "read_bytes", 0)), float(getattr(self._weights, "reading_s", 0.0))
