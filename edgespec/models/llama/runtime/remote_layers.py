"""The weights of a model some of whose layers are on other machines, which may be lost."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.errors import EdgeSpecError
from edgespec.models.llama.runtime.residency import AllInMemory


class RemoteLayers(AllInMemory):
    """Notices that a machine is gone: a `Residency`.

    Args:
        lost: gives an error if a machine is gone; called around every decode.
        release: ends the connections, once the model is freed.
        setup_s: total seconds that passes have spent on what is needed once for their number of rows.
    """

    def __init__(
        self,
        *,
        lost: Callable[[], EdgeSpecError | None],
        release: Callable[[], None],
        setup_s: Callable[[], float],
    ) -> None:
        self._lost = lost
        self._release = release
        self._setup_s = setup_s

    @property
    def setup_s(self) -> float:
        """Total seconds that passes have spent on what is needed once for their number of rows."""
        return self._setup_s()

    def failure(self) -> EdgeSpecError | None:
        """An error if a machine is gone."""
        return self._lost()

    def close(self) -> None:
        """End the connections, after the model has been freed."""
        self._release()
