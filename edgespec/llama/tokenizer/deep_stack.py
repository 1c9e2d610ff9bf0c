"""Running recursive native code on a stack of known size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_BYTES = 16 << 20  # of address space; only what is used of it takes memory
_lock = threading.Lock()


def on_deep_stack(action: Callable[[], Result]) -> Result:
    """Run `action` in a thread of its own with a stack of 16 MiB, and return what it returns.

    The usual stack sizes differ between systems and with `ulimit -s`. An exception that interrupts the
    calling thread is raised when the action has ended, because the action uses what the caller might free.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _lock:
        before = threading.stack_size(_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    interrupted: BaseException | None = None
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return results[0]
