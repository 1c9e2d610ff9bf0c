"""A disk that passes wait for, however slowly they compute."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.offload.slot_filler import SlotFiller
from edgespec.offload.store_reader import StoreReader


def slow_down(patch: pytest.MonkeyPatch) -> None:
    """Let reads of layers end only while a pass waits for one, or after a second."""
    read, waiting, wait = StoreReader.read, SlotFiller.waiting, SlotFiller.wait
    awaited = threading.Event()

    @contextlib.contextmanager
    def until_it_came(filler: SlotFiller) -> Iterator[None]:
        try:
            with waiting(filler):
                yield
        finally:
            awaited.clear()

    def slowly(reader: StoreReader, *arguments: Any) -> None:
        awaited.wait(1.0)
        read(reader, *arguments)

    def idling(filler: SlotFiller, *arguments: Any) -> None:
        awaited.set()
        wait(filler, *arguments)

    patch.setattr(StoreReader, "read", slowly)
    patch.setattr(SlotFiller, "waiting", until_it_came)
    patch.setattr(SlotFiller, "wait", idling)
