"""The packed layer file: what ggml would make of the weights, whole or not there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import zlib
from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.models.gguf import read_header
from edgespec.models.runtime import start_backend
from edgespec.offload import ggml, pack
from edgespec.offload.kernels import kernel_layout
from edgespec.offload.layout import ModelFiles, Store
from edgespec.offload.pack import StalePack, build_pack, content_fingerprint, open_pack, pack_path

LAYERS = 3  # of the model's; packing all of them in every test would show no more


@pytest.fixture
def files(q4_drafter_path: Path) -> ModelFiles:
    start_backend()
    return ModelFiles.of(read_header(q4_drafter_path))


def build(files: ModelFiles, path: Path) -> Store:
    return build_pack(path, files, files.layers()[:LAYERS], content_fingerprint(files))


def test_a_packed_file_holds_what_the_kernels_want(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "packs" / "model.pack"
    seen: list[float] = []
    fingerprint = content_fingerprint(files)
    store = build_pack(path, files, files.layers()[:LAYERS], fingerprint, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert open_pack(path, fingerprint) == store
    assert [entry.name for entry in path.parent.iterdir()] == ["model.pack"]
    assert store.packed
    packed, original = path.read_bytes(), files.paths[0].read_bytes()
    for layer in files.layers()[:LAYERS]:
        stored = store.layers[layer.index]
        for piece in stored.pieces:
            assert zlib.crc32(packed[piece.offset : piece.offset + piece.n_bytes]) == piece.checksum
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


def test_gguf_structures_are_where_they_are_expected() -> None:
    start_backend()
    ggml.check.__wrapped__()


def test_a_shifted_structure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    start_backend()

    class Shifted(ctypes.Structure):
        _fields_ = [("new", ctypes.c_void_p), *ggml._Buffer._fields_]

    monkeypatch.setattr(ggml, "_Buffer", Shifted)
    with pytest.raises(ggml.UnsupportedBuild, match="a buffer's type is"):
        ggml.check.__wrapped__()


def test_the_fingerprint_sees_weights_not_only_names(files: ModelFiles, tmp_path: Path) -> None:
    copy = tmp_path / files.paths[0].name
    shutil.copy(files.paths[0], copy)
    assert content_fingerprint(ModelFiles.of(read_header(copy))) == content_fingerprint(files)
    with copy.open("r+b") as file:
        file.seek(files.headers[0].data_offset)
        file.write(bytes(4096))
    tuned = ModelFiles.of(read_header(copy))
    assert pack_path(tmp_path, tuned) == pack_path(tmp_path, files)
    assert content_fingerprint(tuned) != content_fingerprint(files)


def test_a_file_that_does_not_fit_is_stale(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pack"
    fingerprint = content_fingerprint(files)
    with pytest.raises(StalePack, match="is not there"):
        open_pack(path, fingerprint)
    build(files, path)
    with pytest.raises(StalePack, match="made from other weights"):
        open_pack(path, "0" * 32)
    with monkeypatch.context() as patch:
        patch.setattr(pack, "build_identity", lambda: "another")
        with pytest.raises(StalePack, match=r"another llama\.cpp build or CPU"):
            open_pack(path, fingerprint)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StalePack, match="is damaged: it has"):
        open_pack(path, fingerprint)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(StalePack, match="index does not match"):
        open_pack(path, fingerprint)
    path.write_bytes(b"EDGE")
    with pytest.raises(StalePack, match="cannot be read"):
        open_pack(path, fingerprint)


@pytest.mark.parametrize("function", ["posix_fallocate", "fsync"])
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
        "Make room on the disk, or use --pack never."
    )
    assert list(path.parent.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(files: ModelFiles, tmp_path: Path) -> None:
    def interrupt(_fraction: float) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "model.pack"
    with pytest.raises(KeyboardInterrupt):
        build_pack(path, files, files.layers()[:LAYERS], "x", interrupt)
    assert list(tmp_path.iterdir()) == []
