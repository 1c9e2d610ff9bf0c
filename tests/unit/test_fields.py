"""The conversion of requests in several threads."""

from __future__ import annotations

import threading

import msgspec

from edgespec.api.fields import converted

_others: list[threading.Thread] = []
_found: list[object] = []


def _use() -> None:
    _found.append(converted({"last": 2}, Described))


def used_meanwhile() -> type[int]:
    """An annotation that takes its time: msgspec evaluates it when the type is first used."""
    _others.append(threading.Thread(target=_use))
    _others[-1].start()
    _others[-1].join(0.2)
    return int


class Described(msgspec.Struct):
    first: used_meanwhile() = 0  # type: ignore[valid-type]
    last: int = 0


def test_two_threads_may_be_the_first_to_use_a_type() -> None:
    """Unlocked, msgspec reads the other thread's unfinished description, and crashes."""
    _use()
    for other in _others:
        other.join()
    assert _found == [Described(last=2)] * 2
