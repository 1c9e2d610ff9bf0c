"""What cannot be used any more in a process that was forked.

A fork copies memory and one thread. The threads that read weights and those that compute stay behind, and
whoever waits for them in the new process waits for ever. So everything that needs them is told, and says
so when it is used.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from edgespec.errors import BackendError


class LeftBehind(Protocol):
    """Something that works in the process that made it, and in no other."""

    def forked(self) -> None:
        """This process is a fork of that one."""


_open: weakref.WeakSet[LeftBehind] = weakref.WeakSet()
_computed = False  # llama.cpp has made its threads
_lost = False  # it had, in the process that this one was forked from


def watch(thing: LeftBehind) -> None:
    """Have it told of forks, for as long as it lives."""
    _open.add(thing)


def has_computed() -> None:
    """llama.cpp has computed something in this process."""
    global _computed
    _computed = True


def check_computing() -> None:
    """Whether llama.cpp can compute here.

    Raises:
        BackendError: this process was forked from one in which it had computed already.
    """
    if _lost:
        raise BackendError(
            "llama.cpp cannot compute here: this process was forked from one in which it had computed.",
            "Start the process anew, for example with multiprocessing's 'spawn' method.",
        )


def refusal() -> BackendError:
    """What to raise where a model of the process before the fork is used."""
    return BackendError(
        "The model was loaded before this process was forked, and works in the original process only.",
        "Load it in a process that was started anew, for example with multiprocessing's 'spawn' method.",
    )


def _after_fork() -> None:
    global _lost
    _lost = _lost or _computed
    for thing in list(_open):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
