"""Widened targets, made for measuring and removed afterwards: the same answers, more bytes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from platformdirs import user_cache_path

from edgespec.errors import OutputError, UsageError
from edgespec.files.writing import remove_abandoned
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.widen import widen
from edgespec.models.hub.removal import packs_folder
from edgespec.models.llama.quantize import make_drafter
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.offload.packing.pack import gains_from_packing, pack_path
from edgespec.progress import Progress
from edgespec.units import readable

_SPARE = 1 << 30  # bytes left free on the disk
_OURS = re.compile(r".+-widened-\d+-for-(\d+)\.gguf")


@contextlib.contextmanager
def widened_target(source: Path, n_bytes: int, *, keep: bool, on_progress: Progress) -> Iterator[Path]:
    """A model of about `n_bytes` that gives the answers of `source`; removed when the block is left.

    If the CPU has no repacked kernels for the quantization of `source`, it is requantized to Q4_0 first.

    Args:
        keep: do not remove it, and reuse one that was kept.

    Raises:
        OutputError: the disk has no room for it and its packed file.
        EdgeSpecError: `source` cannot be widened.
    """
    folder = user_cache_path("edgespec") / "bench-models"
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    owner = "" if keep else f"-for-{os.getpid()}"
    path = folder / f"{source.stem}-widened-{n_bytes}{owner}.gguf"
    if not (keep and path.exists()):
        _check_room(folder, source, n_bytes)
        with _suited(source, folder, on_progress) as suited:
            widen(suited, path, n_bytes, on_progress=on_progress)
    try:
        yield path
    finally:
        if not keep:
            remove_with_pack(path)


def remove_with_pack(path: Path) -> None:
    """Remove a model that was made here, and its packed file."""
    with contextlib.suppress(Exception):  # a file that is not a model has no packed file
        pack = pack_path(packs_folder(), ModelFiles.of(read_header(path)))
        for file in (pack, pack.with_suffix(".lock"), pack.with_name(f"{pack.name}.sources")):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what was made for processes that were killed before they could remove it."""
    for path in folder.glob("*.gguf"):
        owner = _OURS.fullmatch(path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            remove_with_pack(path)
    for path in folder.glob("q4_0-for-*"):
        if not psutil.pid_exists(int(path.name.split("-")[2])):
            shutil.rmtree(path, ignore_errors=True)
    remove_abandoned(folder)


@contextlib.contextmanager
def _suited(source: Path, folder: Path, on_progress: Progress) -> Iterator[Path]:
    """`source`, or the same as Q4_0 if the CPU's fastest kernels cannot take it as it is."""
    start_backend()
    if gains_from_packing(ModelFiles.of(read_header(source)).layers()):
        yield source
        return
    on_progress(f"Requantizing {source.name} to Q4_0", 0.0)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"q4_0-for-{os.getpid()}-") as place:
        yield make_drafter(source, Path(place) / f"{source.stem}-q4_0.gguf")


def _check_room(folder: Path, source: Path, n_bytes: int) -> None:
    size = source.stat().st_size
    if n_bytes <= size:
        raise UsageError(
            f"{source.name} has {readable(size)} already, and --synthesize requests {readable(n_bytes)}.",
            "Ask for more.",
        )
    needed = 2 * n_bytes + size + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"A widened target of {readable(n_bytes)} and its packed file need {readable(needed)} of disk, "
            f"some to spare included, and {readable(free)} are free in {folder}.",
            "Ask for a smaller --synthesize, or set XDG_CACHE_HOME to a folder on a larger disk.",
        )
