"""The packed layer file: what ggml would make of the weights, whole or not there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from edgespec.errors import OutputError, StreamError
from edgespec.files import state as filestate
from edgespec.files.positioned import BLOCK
from edgespec.files.writing import remove_abandoned
from edgespec.kernels import ggml
from edgespec.kernels.ggml import checks, structs
from edgespec.kernels.layouts import kernel_layout
from edgespec.llama.runtime.backend import start_backend
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.parts import split_layers
from edgespec.offload.layout import Store
from edgespec.offload.packing import pack
from edgespec.offload.packing.build import build_pack
from edgespec.offload.packing.index import HEAD, StalePack
from edgespec.offload.packing.pack import open_pack
from tests.tamper import rearrange
from tests.waiting import PATIENCE_S

LAYERS = 3  # of the model's; packing all of them in every test would show no more


@pytest.fixture
def files(q4_drafter_path: Path) -> ModelFiles:
    start_backend()
    return ModelFiles.of(read_header(q4_drafter_path))


def build(files: ModelFiles, path: Path) -> Store:
    return build_pack(path, files, files.layers()[:LAYERS])


def test_a_packed_file_holds_what_the_kernels_want(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "packs" / "model.pack"
    seen: list[float] = []
    store = build_pack(path, files, files.layers()[:LAYERS], seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert open_pack(path, files) == store
    assert [entry.name for entry in path.parent.iterdir()] == ["model.pack"]
    assert store.packed
    packed, original = path.read_bytes(), files.paths[0].read_bytes()
    for layer in files.layers()[:LAYERS]:
        stored = store.layers[layer.index]
        for piece in stored.pieces:
            assert (
                xxhash.xxh3_64_intdigest(packed[piece.offset : piece.offset + piece.n_bytes])
                == piece.checksum
            )
        start = stored.pieces[0].offset
        for tensor in layer.tensors:
            raw = original[tensor.offset : tensor.offset + tensor.n_bytes]
            layout = kernel_layout(tensor.type_id, tensor.shape)
            if layout:
                source = ctypes.create_string_buffer(raw, len(raw))
                raw = layout.pack(tensor.type_id, tensor.shape, ctypes.addressof(source), tensor.n_bytes)
                assert store.kernels[tensor.name] == layout.name
            at = start + stored.places[tensor.name]
            assert packed[at : at + len(raw)] == raw


def test_every_byte_that_is_read_has_a_checksum(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "model.pack"
    store = build(files, path)
    end = BLOCK
    for piece in (piece for layer in store.layers.values() for piece in layer.pieces):
        assert piece.checksum is not None
        assert piece.offset == end
        end += piece.n_bytes
    # Block 0 and the index: whatever is changed there is noticed, but in what the block has no use for.
    whole = bytearray(path.read_bytes())
    for at in (*range(HEAD.size), end, (end + len(whole)) // 2, len(whole) - 1):
        whole[at] ^= 1
        path.write_bytes(whole)
        with pytest.raises(StalePack):
            open_pack(path, files)
        whole[at] ^= 1


def test_a_pack_with_other_parts_is_stale(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "model.pack"
    layers = files.layers()
    order = tuple(tensor.name for layer in layers for tensor in layer.tensors)
    parts = split_layers(layers, order, 1)
    assert len(parts) > len(layers)
    store = build_pack(path, files, parts)
    assert open_pack(path, files, layers=parts) == store
    with pytest.raises(StalePack, match="other parts"):
        open_pack(path, files, layers=layers)


def test_gguf_structures_are_where_they_are_expected() -> None:
    start_backend()
    ggml.check.__wrapped__()


def test_a_shifted_structure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    start_backend()

    class Shifted(ctypes.Structure):
        _fields_ = [("new", ctypes.c_void_p), *structs.Buffer._fields_]

    monkeypatch.setattr(checks, "Buffer", Shifted)
    with pytest.raises(ggml.UnsupportedBuild, match="a buffer's type is"):
        ggml.check.__wrapped__()


@pytest.fixture
def copy(files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """A copy that may be written to, whose times count as old."""
    monkeypatch.setattr(filestate, "_COARSEST_NS", 0)
    path = tmp_path / files.paths[0].name
    shutil.copy(files.paths[0], path)
    return ModelFiles.of(read_header(path))


def test_a_pack_is_stale_when_any_matrix_has_changed(copy: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "model.pack"
    build(copy, path)
    assert open_pack(path, copy)
    rearrange(copy.paths[0])
    assert ModelFiles.of(read_header(copy.paths[0])) == copy  # the header says nothing of it
    with pytest.raises(StalePack, match="made from other weights"):
        open_pack(path, copy)


def test_a_pack_fits_any_copy_of_its_model_which_is_read_once(
    copy: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pack"
    store = build(copy, path)
    reads: list[float] = []

    def opened(files: ModelFiles) -> int:
        reads.clear()
        assert open_pack(path, files, reads.append) == store
        return len(reads)

    assert opened(copy) == 0
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    other = ModelFiles.of(read_header(Path(shutil.copy(copy.paths[0], folder))))
    assert opened(other) > 0
    assert reads == sorted(reads)
    assert reads[-1] == 1.0
    assert opened(other) == opened(copy) == 0
    other.paths[0].touch()
    assert opened(other) > 0
    (folder / "linked.gguf").hardlink_to(other.paths[0])
    assert opened(other) > 0
    assert opened(ModelFiles.of(read_header(folder / "linked.gguf"))) == 0  # it is the same file
    # What is known of copies says nothing of a pack that was made from other weights.
    rearrange(other.paths[0])
    build(other, path)
    with pytest.raises(StalePack, match="made from other weights"):
        open_pack(path, copy)


def test_a_file_that_was_written_a_moment_ago_is_compared_by_content(
    copy: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second write may leave the same times, where times are coarse.
    monkeypatch.setattr(filestate, "_COARSEST_NS", 1 << 62)
    path = tmp_path / "model.pack"
    build(copy, path)
    reads: list[float] = []
    assert open_pack(path, copy, reads.append)
    assert reads


def test_a_model_that_changes_while_it_is_packed_makes_no_pack(copy: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "model.pack"

    def meddle(fraction: float) -> None:
        if fraction == 1.0:
            rearrange(copy.paths[0])

    with pytest.raises(StreamError, match="was changed while it was being read"):
        build_pack(path, copy, copy.layers()[:LAYERS], meddle)
    assert [entry.name for entry in tmp_path.iterdir()] == [copy.paths[0].name]


def test_a_file_that_does_not_fit_is_stale(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pack"
    with pytest.raises(StalePack, match="does not exist"):
        open_pack(path, files)
    build(files, path)
    other = ModelFiles((replace(files.headers[0], fingerprint="0" * 32),))
    with pytest.raises(StalePack, match="made from another model"):
        open_pack(path, other)
    with monkeypatch.context() as patch:
        patch.setattr(pack, "build_identity", lambda: "another")
        with pytest.raises(StalePack, match=r"another llama\.cpp build or CPU"):
            open_pack(path, files)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StalePack, match="is damaged: it has"):
        open_pack(path, files)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(StalePack, match="index does not match"):
        open_pack(path, files)
    path.write_bytes(b"EDGE")
    with pytest.raises(StalePack, match="cannot be read"):
        open_pack(path, files)


@pytest.mark.parametrize("function", [name for name in ("posix_fallocate", "fsync") if hasattr(os, name)])
def test_a_full_disk_leaves_nothing_behind(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, function, full)
    path = tmp_path / "packs" / "model.pack"
    with pytest.raises(OutputError) as caught:
        build(files, path)
    assert str(caught.value) == (
        f"The packed layer file '{path}' cannot be written: No space left on device. "
        "Free some disk space, or use pack='never'."
    )
    assert list(path.parent.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(files: ModelFiles, tmp_path: Path) -> None:
    def interrupt(_fraction: float) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "model.pack"
    with pytest.raises(KeyboardInterrupt):
        build_pack(path, files, files.layers()[:LAYERS], interrupt)
    assert list(tmp_path.iterdir()) == []


PACKING = """
import sys, time
from pathlib import Path
from edgespec.models.gguf.header import read_header
from edgespec.llama.runtime.backend import start_backend
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing.build import build_pack

def hold(fraction):
    print(fraction, flush=True)
    time.sleep(3600)  # until it is killed

start_backend()
files = ModelFiles.of(read_header(Path(sys.argv[1])))
build_pack(Path(sys.argv[2]), files, files.layers(), hold)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_packing_that_is_killed_leaves_nothing_for_long(files: ModelFiles, tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    path = tmp_path / "packs" / "model.pack"
    command = [sys.executable, "-c", PACKING, str(files.paths[0]), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            (partial,) = path.parent.iterdir()
            assert partial.stat().st_size > 10_000_000
            assert remove_abandoned(path.parent) == 0  # it is being written
            assert partial.exists()
            child.send_signal(number)
            child.wait(PATIENCE_S)
        finally:
            child.kill()
    assert child.returncode == -number  # it ends by the signal, as it would have without cleaning up
    assert list(path.parent.iterdir()) == ([partial] if name == "SIGKILL" else [])
    freed = remove_abandoned(path.parent)
    assert (freed > 10_000_000) == (name == "SIGKILL")
    assert list(path.parent.iterdir()) == []
