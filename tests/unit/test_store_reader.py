"""Pieces of layers: what a file that changes in use may still be read for."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from edgespec.errors import StreamError
from edgespec.files.positioned import BLOCK
from edgespec.kernels.ggml import cpu_device
from edgespec.offload import store_reader
from edgespec.offload.layout import Piece, Store, StoredLayer
from edgespec.offload.store_reader import DamagedPack, StoreReader
from edgespec.offload.weight_memory import PinnedMemory, WeightMemory
from tests.tamper import time_put_back

SIZE = 3 * BLOCK + 100  # as the model's own files, it does not end at a block
CONTENT = os.urandom(SIZE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    os.utime(path, ns=(1, 1))
    return path


@pytest.fixture
def memory() -> Iterator[memoryview]:
    with mmap.mmap(-1, 2 * BLOCK) as area, memoryview(area) as view:
        yield view


def pieces(*, packed: bool) -> list[Piece]:
    def checksum(at: int) -> int | None:
        return xxhash.xxh3_64_intdigest(CONTENT[at : at + 2 * BLOCK]) if packed else None

    return [Piece(0, at, 0, 2 * BLOCK, checksum(at)) for at in (0, 2 * BLOCK)]


def opened(file: Path, *, packed: bool) -> StoreReader:
    return StoreReader(Store((file,), {}, {}, packed=packed))


def overwrite(file: Path, at: int) -> None:
    with time_put_back(file), file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([CONTENT[at] ^ 1]))


@pytest.mark.parametrize("at", [10, SIZE - 1])
def test_a_file_overwritten_with_its_time_put_back_is_noticed(
    file: Path, memory: memoryview, at: int
) -> None:
    reader = opened(file, packed=False)
    both = pieces(packed=False)
    for piece in both:
        reader.read([piece], [memory])
    overwrite(file, at)
    changed, same = both if at < 2 * BLOCK else both[::-1]
    with pytest.raises(StreamError, match="was changed while the model was in use"):
        reader.read([changed], [memory])
    reader.read([same], [memory])
    reader.close()


def test_a_piece_that_was_never_read_cannot_be_trusted_after_a_change(file: Path, memory: memoryview) -> None:
    reader = opened(file, packed=False)
    first, second = pieces(packed=False)
    reader.read([first], [memory])
    overwrite(file, 2 * BLOCK)
    with pytest.raises(StreamError, match="was changed while the model was in use"):
        reader.read([second], [memory])
    reader.close()


def test_a_pack_overwritten_in_use_is_damaged(file: Path, memory: memoryview) -> None:
    reader = opened(file, packed=True)
    first, _ = pieces(packed=True)
    for _ in range(2):
        reader.read([first], [memory])
    overwrite(file, BLOCK)
    with pytest.raises(DamagedPack, match="is damaged, and was removed"):
        reader.read([first], [memory])
    reader.close()
    assert not file.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.rename(file.with_name("other")),
        lambda file: file.unlink(),
        lambda file: file.with_name("link").hardlink_to(file),
        lambda file: file.chmod(0o600),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_with_another_name_or_mode_is_still_read(
    file: Path, memory: memoryview, change: Callable[[Path], None], packed: bool
) -> None:
    reader = opened(file, packed=packed)
    both = pieces(packed=packed)
    for piece in both:
        reader.read([piece], [memory])
    change(file)
    for piece in [*both, *both]:
        reader.read([piece], [memory])
        with memory[: min(2 * BLOCK, SIZE - piece.offset)] as read:
            assert read == CONTENT[piece.offset : piece.offset + 2 * BLOCK]
    reader.close()


@pytest.mark.parametrize("packed", [False, True])
def test_pinned_memory_is_tried_with_a_piece_that_it_holds(
    file: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer may be larger than the one that the memory is for."""
    sizes = [2 * BLOCK, BLOCK]
    digests = [xxhash.xxh3_64_intdigest(CONTENT[:size]) if packed else None for size in sizes]
    layers = {
        n: StoredLayer(n, (Piece(0, 0, 0, size, digest),), {}, size)
        for n, (size, digest) in enumerate(zip(sizes, digests, strict=True))
    }
    allocated = WeightMemory(BLOCK)
    monkeypatch.setattr(PinnedMemory, "allocated", lambda *_: allocated)
    with closing(StoreReader(Store((file,), layers, {}, packed=packed))) as reader:
        with closing(reader.memory_for(BLOCK, cpu_device())) as memory:
            assert memory is allocated
            assert not reader.unpinned
        with mmap.mmap(-1, 2 * BLOCK) as area, memoryview(area) as view:
            reader.read(list(layers[0].pieces), [view])  # compared with what was read whole


def test_memory_that_cannot_be_pinned_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedMemory, "allocated", lambda *_: None)
    for name, told in (("", False), ("Pinned", True)):
        monkeypatch.setattr(store_reader, "pinned_memory_name", lambda _device, name=name: name)
        with closing(opened(file, packed=False)) as reader:
            reader.memory_for(BLOCK, cpu_device()).close()
            assert reader.unpinned == told
