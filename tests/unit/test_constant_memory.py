"""Thousands of requests: what is kept of them does not grow with their number."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from edgespec import GenerationConfig
from edgespec.engine.requests import Request
from edgespec.generation.result import PassRecord
from edgespec.profiles.store import ProfileStore
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.drafters.base import NoDrafter
from tests.unit.fakes import fake_engine

COUNT = 1500


def test_requests_and_answers_are_let_go_when_they_are_done() -> None:
    engine, _ = fake_engine(NoDrafter(), 4, never_ends=True)
    alive: weakref.WeakSet[Request] = weakref.WeakSet()

    def requests() -> Iterator[Request]:
        for number in range(COUNT):
            request = Request([1 + number % 20], GenerationConfig(max_tokens=1 + number % 3), raw=True)
            alive.add(request)
            yield request
            del request

    done = most = 0
    with engine:
        for event in engine.stream_many(requests(), parallel=6):
            if event.chunk is not None and event.chunk.generation is not None:
                done += 1
            del event
            most = max(most, len(alive))
    assert done == COUNT
    assert most <= 9, "six in flight, one being taken, and those of the last pass"


def test_the_times_of_passes_are_those_of_the_latest() -> None:
    updates = ProfileUpdates(None, ProfileStore())
    for number in range(5000):
        updates.add_pass(PassRecord(8, 0, 0.0, float(number), 0.0), threads=1)
    (kept,) = updates._seconds.values()
    assert len(kept) == 1000
    assert kept[-1] == 4999.0
