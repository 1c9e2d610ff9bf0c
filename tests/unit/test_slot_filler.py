"""Threads that read weights: whatever goes wrong in one is an error where the weights are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from edgespec.errors import MemoryLimitError, StreamError
from edgespec.files.positioned import BLOCK
from edgespec.offload.layout import Piece, Read, Store
from edgespec.offload.slot_filler import SlotFiller, SlotLoad
from edgespec.offload.store_reader import StoreReader
from tests.waiting import PATIENCE_S

SCRATCH = 1 << 30
DIRECT = Read.of(Piece(0, 0, 0, BLOCK))
MOVED = Read(Piece(0, 0, 32, BLOCK), 0, BLOCK)  # to where no block begins, so by way of scratch memory


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[StoreReader]:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * (BLOCK // 256))
    with closing(StoreReader(Store((path,), {}, {}, packed=False))) as reader:
        yield reader


def open_filler(reader: StoreReader, on_ended: Callable[[SlotLoad], bool] = lambda _load: True) -> SlotFiller:
    return SlotFiller(
        reader, n_slots=1, slot_bytes=2 * BLOCK, n_threads=1, on_ended=on_ended, scratch_bytes=SCRATCH
    )


def load(filler: SlotFiller, *wanted: Read) -> None:
    """Read something as a pass does, and wait until it is there."""
    load, end = SlotLoad(0, 0), time.monotonic() + PATIENCE_S
    with filler.waiting():
        filler.read(load, wanted)
        while load.missing and load.error is None:
            filler.wait(lambda: time.monotonic() > end)
    if load.error is not None:
        raise load.error


@contextmanager
def little_address_space(left: int) -> Iterator[None]:
    """A process that the system gives no more than `left` bytes of further address space."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_scratch_memory_that_the_system_refuses_is_an_error_and_is_tried_again(reader: StoreReader) -> None:
    with ExitStack() as stack:
        with little_address_space(SCRATCH // 2):
            filler = stack.enter_context(closing(open_filler(reader)))
            load(filler, DIRECT)
            with pytest.raises(MemoryLimitError, match="Not enough memory"):
                load(filler, MOVED)
            load(filler, DIRECT)
        load(filler, MOVED)


def test_a_thread_that_the_system_refuses_is_an_error(reader: StoreReader) -> None:
    with little_address_space(SCRATCH // 4), pytest.raises(StreamError, match="Cannot start a thread"):
        SlotFiller(reader, n_slots=1, slot_bytes=BLOCK, n_threads=4000, on_ended=lambda _load: True).close()


def test_a_thread_that_fails_ends_the_pass_and_every_later_one_with_the_reason(reader: StoreReader) -> None:
    def fail(_load: SlotLoad) -> bool:
        raise RuntimeError("no such layer")

    with closing(open_filler(reader, fail)) as filler:
        for _ in range(2):
            with pytest.raises(StreamError) as caught:
                load(filler, DIRECT, MOVED)
            assert caught.value.what == "A thread that reads weights has failed: RuntimeError: no such layer."
            assert caught.value.hint == "Load the model again."
