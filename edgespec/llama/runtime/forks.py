"""Refusing to use what a fork has broken.

A fork copies memory and one thread. The threads that read weights and those that compute do not exist in the
new process, which would wait for them for ever. So everything that needs them is notified, and raises an
error when it is used there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from edgespec.errors import BackendError


class ForkAware(Protocol):
    """Something that works only in the process that created it."""

    def forked(self) -> None:
        """True if this process is a fork of that one."""


_open: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_computed = False  # llama.cpp has started its threads
_lost = False  # it had started them in the process that this one was forked from


def notify_of_forks(thing: ForkAware) -> None:
    """Call its `forked` in forked processes, as long as it lives."""
    _open.add(thing)


def has_computed() -> None:
    """llama.cpp has computed something in this process."""
    global _computed
    _computed = True


def check_computing() -> None:
    """Make sure that llama.cpp can compute here.

    Raises:
        BackendError: it had computed before this process was forked.
    """
    if _lost:
        raise BackendError(
            "llama.cpp cannot compute here: this process was forked from one that had used llama.cpp.",
            "Start a new process instead, for example with multiprocessing's 'spawn' method.",
        )


def refusal() -> BackendError:
    """The error for using a model that was loaded before the fork."""
    return BackendError(
        "The model was loaded before this process was forked and works in the original process only.",
        "Load it in the new process, for example with multiprocessing's 'spawn' method.",
    )


def _after_fork() -> None:
    global _lost
    _lost = _lost or _computed
    for thing in list(_open):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
