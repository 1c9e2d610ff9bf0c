"""The choice of the source of streamed weights: the model's own files, or a packed file, made if need be."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from filelock import FileLock

from edgespec.base.option import named
from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.errors import OutputError
from edgespec.files.writing import remove_abandoned
from edgespec.models.gguf.experts import LayerWeights
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import Store, plain_store
from edgespec.offload.packing.build import build_pack, cannot_write
from edgespec.offload.packing.division import IN_CACHE, PackFolders, RatesOf, divide
from edgespec.offload.packing.index import StalePack, part_path, remove_pack
from edgespec.offload.packing.pack import (
    PartGone,
    gains_from_packing,
    open_pack,
    pack_path,
    packed_bytes,
    piece_sizes,
)

_SPARE_DISK = 1 << 30  # to leave free on the disk when packing
_OTHER_CACHE = "Set XDG_CACHE_HOME to a folder on a disk."


def packing_in_memory(
    files: ModelFiles,
    weights: LayerWeights,
    pack: str,
    folder: Path,
    notes: list[str],
    spread: PackFolders = IN_CACHE,
) -> tuple[str, int]:
    """Decide whether to pack, and the most memory that the packed layers then take.

    Args:
        folder: of packed files.
        notes: gets a sentence if a folder in memory is the reason not to pack.
        spread: the folders that people named for the parts.
    """
    if pack == "never":
        return pack, 0
    places = spread.folders or (folder,)
    in_memory = PackFolders(places).in_memory
    if pack == "always":
        return pack, packed_bytes(weights.layers, weights.experts) if in_memory else 0
    if len(in_memory) < len(places):
        return pack, 0
    if gains_from_packing(files.layers()):
        remedy = f"Name another for {named('pack_dir')}." if spread.folders else _OTHER_CACHE
        notes.append(
            f"No packed layer file is used, as '{in_memory[0]}' lies in memory: the model file itself is "
            f"streamed, which computes slower. {remedy}"
        )
    return "never", 0


def choose_store(
    files: ModelFiles,
    weights: LayerWeights,
    pack: str,
    folder: Path,
    notes: list[str],
    on_progress: Progress,
    spread: PackFolders = IN_CACHE,
) -> Store:
    """The store to read these weights from; packs them first if that is wanted.

    Args:
        weights: of all the model's layers.
        notes: gets sentences that people should read.
        spread: the folders that people named for its parts.

    Raises:
        OutputError: the packed file cannot be written, with `pack` "always".
    """
    plain = plain_store(files, weights.layers, weights.experts)
    remove_abandoned(folder)  # killed packing leaves files as large as the model
    if pack == "never" or (pack == "auto" and not gains_from_packing(files.layers())):
        return plain
    path = pack_path(folder, files, experts=bool(weights.experts))
    usable = spread.usable(notes, in_memory=pack == "always")
    for place in usable:
        remove_abandoned(place)

    def check(fraction: float) -> None:
        name = files.paths[0].name
        on_progress(f"{name} has changed; checking whether its packed copy is still valid", fraction)

    def found() -> Store | None:
        with suppress(StalePack):
            return open_pack(path, files, check, weights.layers)
        return None

    try:
        known = open_pack(path, files, check, weights.layers)
    except PartGone as gone:
        if pack == "auto":  # its disk may come back, and packing anew takes long
            notes.append(
                f"{gone}: streaming the model file itself, which computes slower. "
                f"Use {named('pack', 'always')} to pack the layers again."
            )
            return plain
        notes.append(f"{gone}: packed the layers again.")
        known = None
    except StalePack:
        known = None
    if known is not None and spread.keeps(known, usable):
        return known
    packing = _Packing(files, weights, path, usable, spread.rates_of)
    try:
        if spread.folders and not usable:
            raise OutputError(
                f"No folder of {named('pack_dir')} can hold packed layers.",
                f"Name another, or use {named('pack', 'never')}.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        on_progress(f"Waiting to pack {files.paths[0].name}", 0.0)
        with FileLock(path.with_suffix(".lock")):  # two processes at once would need twice the space
            known = found()
            if known is not None and spread.keeps(known, usable):
                return known  # another process has made it
            refusal = packing.lack_of_room() if pack == "auto" else ""
            if not refusal:
                return packing.run(on_progress)
            notes.append(refusal)
    except (OutputError, OSError) as error:
        refused = error if isinstance(error, OutputError) else cannot_write(path, error)
        if pack == "always":
            raise refused from error
        notes.append(f"{refused.what} Streaming the model file itself, which computes slower.")
        known = found()
    return known or plain


class _Packing:
    """The packing of one model into a file, or into its parts in several folders."""

    def __init__(
        self,
        files: ModelFiles,
        weights: LayerWeights,
        path: Path,
        folders: tuple[Path, ...],
        rates_of: RatesOf,
    ) -> None:
        self._files = files
        self._weights = weights
        self._path = path
        self._folders = folders
        self._rates_of = rates_of

    @cached_property
    def _rates(self) -> dict[Path, float]:
        return dict(zip(self._folders, self._rates_of(self._folders), strict=True)) if self._folders else {}

    @cached_property
    def _n_bytes(self) -> int:
        return packed_bytes(self._weights.layers, self._weights.experts)

    def _shares(self) -> dict[Path, int]:
        """Each file that is to be written, and its bytes."""
        if not self._rates:
            return {self._path: self._n_bytes}
        sizes = piece_sizes(self._weights.layers, self._weights.experts)
        shares = divide(sizes, [*self._rates.values()])
        return {
            part_path(self._path, folder): share for folder, share in zip(self._rates, shares, strict=True)
        }

    def lack_of_room(self) -> str:
        """A sentence if a disk has no room for its file; else empty."""
        for file, share in self._shares().items():
            free = _free_disk(file.parent) + (file.stat().st_size if file.exists() else 0)
            if free < share + _SPARE_DISK:
                return (
                    f"The packed layer file would take {readable(share)} in '{file.parent}', and "
                    f"{readable(free)} are free: streaming the model file itself, which computes slower."
                )
        return ""

    def run(self, on_progress: Progress) -> Store:
        """Pack the layers; raises as build_pack."""
        rates = self._rates
        remove_pack(self._path)  # it is stale, and its space is needed
        what = f"Packing {self._files.paths[0].name} for this CPU (once, {readable(self._n_bytes)})"
        layers, experts = self._weights.layers, self._weights.experts
        return build_pack(self._path, self._files, layers, partial(on_progress, what), experts, rates)


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
