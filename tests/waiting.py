"""Waiting for what must happen, however slow or busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest

PATIENCE_S = 300.0
"""After this a test is taken to hang. It is no expectation: what a test asserts must not depend on time."""

_LOOK_S = 0.01

Found = TypeVar("Found")


def wait_until(find: Callable[[], Found], otherwise: Callable[[], object] = lambda: "") -> Found:
    """Wait until `find` returns something true, and return that.

    Args:
        otherwise: tells, for the message of the failure, what there is instead.
    """
    end = time.monotonic() + PATIENCE_S
    while not (found := find()):
        if time.monotonic() > end:
            pytest.fail(f"waited for {PATIENCE_S:.0f} s in vain; {otherwise()}")
        time.sleep(_LOOK_S)
    return found


def wait_until_ended(*processes: psutil.Process) -> None:
    """Wait until no process runs: each is gone, or is a zombie that its parent has not asked about yet."""
    wait_until(lambda: not any(map(_runs, processes)))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
