"""Answers whose weights do not arrive: a read fails, or hangs until the answer is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from edgespec.engine.engine import Engine
from edgespec.errors import StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.generation.result import Generation
from tests.waiting import PATIENCE_S


def cancelled_while_reading(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Generation], *, reads: int
) -> Generation:
    """Cancel an answer while a read hangs, which ends only afterwards.

    Args:
        reads: how many reads begin before one hangs, and all that follow.
    """
    read, left = FileReader.read_into, [reads]
    stuck, may_continue = threading.Event(), threading.Event()

    def hanging(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        left[0] -= 1
        if left[0] <= 0 and not may_continue.is_set():
            stuck.set()
            assert may_continue.wait(PATIENCE_S)
        return read(self, memories, offset)

    def cancel() -> None:
        assert stuck.wait(PATIENCE_S)
        engine.cancel()

    monkeypatch.setattr(FileReader, "read_into", hanging)
    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        return answer()
    finally:
        may_continue.set()
        thread.join()


def fail_a_read(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the read with this number fail, counted from now on."""
    read, countdown = FileReader.read_into, [number]

    def flaky(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise StreamError("Reading failed: Input/output error.")
        return read(self, memories, offset)

    monkeypatch.setattr(FileReader, "read_into", flaky)
