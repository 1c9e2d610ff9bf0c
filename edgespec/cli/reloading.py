"""Loading a model again after a graphics card or a worker has failed in the middle of an answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.errors import DeviceLostError, DeviceMemoryError, WorkerError

LOST = (WorkerError, DeviceLostError, DeviceMemoryError)
"""Failures after which the model is reloaded without the failed device, or with fewer layers on it."""

_MOST = 5  # loads of the same model

_Loaded = TypeVar("_Loaded")
_Result = TypeVar("_Result")


def with_reloads(
    load: Callable[[Config], AbstractContextManager[_Loaded]],
    answer: Callable[[_Loaded], _Result],
    loading: Config,
    terminal: Terminal,
) -> _Result:
    """Load a model and have it answer, and load it again each time that a card or a worker fails.

    Args:
        answer: continues, when it is called again, where it has failed.

    Raises:
        EdgeSpecError: as the two functions do; or the failure itself, after some reloads.
    """
    for left in reversed(range(_MOST)):
        with load(loading) as loaded:
            try:
                return answer(loaded)
            except LOST as error:
                if not left:
                    raise
                terminal.warn(f"{error.what} Reloading the model.")
        loading = loading.with_(leave_out_missing=True)
    raise AssertionError("the last load returns or raises")
