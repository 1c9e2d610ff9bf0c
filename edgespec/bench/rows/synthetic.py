"""Targets that are made for measuring and removed afterwards: the same answers, more bytes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.errors import OutputError, UsageError
from edgespec.files.user_folders import cache_folder
from edgespec.files.writing import remove_abandoned
from edgespec.llama.quantize import make_drafter
from edgespec.llama.routers import routers_for
from edgespec.llama.runtime.backend import start_backend
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.synthesis.mixture import mix
from edgespec.models.gguf.synthesis.widen import widen
from edgespec.offload.packing.index import packs_folder, remove_pack
from edgespec.offload.packing.pack import gains_from_packing, pack_path
from edgespec.progress import Progress
from edgespec.units import readable

_SPARE = 1 << 30  # bytes left free on the disk
_NUMBER = r"\d{1,3}(?:\.\d{1,3})?"
_SHAPE = re.compile(
    rf"(?P<experts>\d{{1,4}})x(?P<used>\d{{1,4}})"
    rf"(?:,skew=(?P<skew>{_NUMBER}))?(?:,locality=(?P<locality>{_NUMBER}))?"
)
_OURS = re.compile(r".+-(?:widened|mixed)-[^-]+-for-(\d+)\.gguf")


@dataclass(frozen=True)
class MixtureShape:
    """A mixture of experts to make.

    Attributes:
        experts: of each layer.
        used: of them for each token.
        skew, locality: of the routers' choices; see llama.routers.
    """

    experts: int
    used: int
    skew: float = 0.7
    locality: float = 0.5

    @classmethod
    def parse(cls, text: str) -> MixtureShape:
        """The mixture that "EXPERTSxTOP" describes, or "EXPERTSxTOP,skew=0.7,locality=0.5".

        Raises:
            UsageError: it describes none.
        """
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"'{text}' is not a mixture of experts.", "Write it like moe:64x4 or moe:64x4,skew=1."
            )
        values = {name: float(match[name]) for name in ("skew", "locality") if match[name]}
        shape = cls(int(match["experts"]), int(match["used"]), **values)
        if not (2 <= shape.experts <= 1024 and 1 <= shape.used < shape.experts):
            raise UsageError(
                f"A mixture of {shape.experts} experts with {shape.used} for each token is not possible.",
                "Ask for 2 to 1024 experts, and for fewer than these for each token.",
            )
        if not (shape.skew <= 10 and shape.locality <= 1):
            raise UsageError(
                f"The skew is {shape.skew:g}, and the locality {shape.locality:g}.",
                "The skew must be from 0 to 10, the locality from 0 to 1.",
            )
        return shape

    def __str__(self) -> str:
        return f"{self.experts}x{self.used},skew={self.skew:g},locality={self.locality:g}"


def synthetic_target(
    source: Path, wanted: int | MixtureShape, *, keep: bool, on_progress: Progress
) -> AbstractContextManager[Path]:
    """A widened target of so many bytes, or a mixture; see the two functions below."""
    if isinstance(wanted, MixtureShape):
        return mixed_target(source, wanted, keep=keep, on_progress=on_progress)
    return widened_target(source, wanted, keep=keep, on_progress=on_progress)


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
    size = source.stat().st_size
    if n_bytes <= size:
        raise UsageError(
            f"{source.name} already has {readable(size)}, more than the {readable(n_bytes)} of --synthesize.",
            "Use a larger size.",
        )

    def make(suited: Path, path: Path) -> None:
        widen(suited, path, n_bytes, on_progress=on_progress)

    with _made(source, f"widened-{n_bytes}", n_bytes, make, keep=keep, on_progress=on_progress) as path:
        yield path


@contextlib.contextmanager
def mixed_target(source: Path, shape: MixtureShape, *, keep: bool, on_progress: Progress) -> Iterator[Path]:
    """A mixture of experts that computes what `source` computes; otherwise as `widened_target`.

    Raises:
        OutputError: the disk has no room for it and its packed file.
        EdgeSpecError: no mixture can be made of `source`.
    """

    def make(suited: Path, path: Path) -> None:
        on_progress(f"Building routers for {shape}", 0.0)
        routers = routers_for(suited, shape.experts, skew=shape.skew, locality=shape.locality)
        mix(suited, path, routers, shape.used, on_progress=on_progress)

    n_bytes = source.stat().st_size * shape.experts  # a little more than it will be
    with _made(source, f"mixed-{shape}", n_bytes, make, keep=keep, on_progress=on_progress) as path:
        yield path


@contextlib.contextmanager
def _made(
    source: Path,
    what: str,
    n_bytes: int,
    make: Callable[[Path, Path], None],
    *,
    keep: bool,
    on_progress: Progress,
) -> Iterator[Path]:
    """A target of about `n_bytes`, made of `source` in the CPU's fastest kernel layout."""
    folder = cache_folder() / "bench-models"
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    owner = "" if keep else f"-for-{os.getpid()}"
    path = folder / f"{source.stem}-{what}{owner}.gguf"
    if not (keep and path.exists()):
        _check_room(folder, source, what.partition("-")[0], n_bytes)
        with _suited(source, folder, on_progress) as suited:
            make(suited, path)
    try:
        yield path
    finally:
        if not keep:
            remove_with_pack(path)


def remove_with_pack(path: Path) -> None:
    """Remove a model that was made here, and its packed file."""
    with contextlib.suppress(Exception):  # a file that is not a model has no packed file
        files = ModelFiles.of(read_header(path))
        for experts in (False, True):
            pack = pack_path(packs_folder(), files, experts=experts)
            remove_pack(pack)
            for file in (pack.with_suffix(".lock"), pack.with_name(f"{pack.name}.sources")):
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


def _check_room(folder: Path, source: Path, kind: str, n_bytes: int) -> None:
    needed = 2 * n_bytes + source.stat().st_size + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"A {kind} target of {readable(n_bytes)} and its packed file need {readable(needed)} of disk, "
            f"some to spare included, and {readable(free)} are free in {folder}.",
            "Lower --synthesize, or set XDG_CACHE_HOME to a folder on a larger disk.",
        )
