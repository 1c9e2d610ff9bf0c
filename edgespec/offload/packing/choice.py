"""The choice of the source of streamed weights: the model's own files, or a packed file, made if need be."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import FileLock

from edgespec.errors import OutputError
from edgespec.files.writing import remove_abandoned
from edgespec.machine.disks import TMPFS, disk_of
from edgespec.models.gguf.experts import LayerWeights
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import Store, plain_store
from edgespec.offload.packing.build import build_pack, cannot_write
from edgespec.offload.packing.pack import StalePack, gains_from_packing, open_pack, pack_path, packed_bytes
from edgespec.progress import Progress
from edgespec.units import readable

_SPARE_DISK = 1 << 30  # to leave free on the disk when packing


def packing_in_memory(
    files: ModelFiles, weights: LayerWeights, pack: str, folder: Path, notes: list[str]
) -> tuple[str, int]:
    """True to pack even if the folder is in memory, and the memory that the packed file then takes."""
    if pack == "never" or disk_of(folder).kind != TMPFS:
        return pack, 0
    if pack == "always":
        return pack, packed_bytes(weights.layers, weights.experts)
    if gains_from_packing(files.layers()):
        notes.append(
            f"No packed layer file is used, as '{folder}' lies in memory: the model file itself is streamed, "
            "which computes slower. Set XDG_CACHE_HOME to a folder on a disk."
        )
    return "never", 0


def choose_store(
    files: ModelFiles,
    weights: LayerWeights,
    pack: str,
    folder: Path,
    notes: list[str],
    on_progress: Progress,
) -> Store:
    """The store to read these weights from; packs them first if that is wanted.

    Args:
        weights: of all the model's layers.
        notes: gets sentences that people should read.

    Raises:
        OutputError: the packed file cannot be written, with `pack` "always".
        StreamError: the model cannot be read.
    """
    plain = plain_store(files, weights.layers, weights.experts)
    remove_abandoned(folder)  # killed packing leaves files as large as the model
    if pack == "never" or (pack == "auto" and not gains_from_packing(files.layers())):
        return plain
    path = pack_path(folder, files, experts=bool(weights.experts))

    def check(fraction: float) -> None:
        name = files.paths[0].name
        on_progress(f"{name} has changed; checking whether its packed copy is still valid", fraction)

    try:
        with suppress(StalePack):
            return open_pack(path, files, check, weights.layers)
        folder.mkdir(parents=True, exist_ok=True)
        on_progress(f"Waiting to pack {files.paths[0].name}", 0.0)
        with FileLock(path.with_suffix(".lock")):  # two processes at once would need twice the space
            with suppress(StalePack):
                return open_pack(path, files, check, weights.layers)  # another process has made it
            needed = packed_bytes(weights.layers, weights.experts)
            free = _free_disk(folder) + (path.stat().st_size if path.exists() else 0)
            if pack == "auto" and free < needed + _SPARE_DISK:
                notes.append(
                    f"The packed layer file would take {readable(needed)} of disk, and {readable(free)} are "
                    "free: streaming the model file itself, which computes slower."
                )
                return plain
            path.unlink(missing_ok=True)  # it is stale, and its space is needed
            what = f"Packing {files.paths[0].name} for this CPU (once, {readable(needed)})"
            report = partial(on_progress, what)
            return build_pack(path, files, weights.layers, report, weights.experts)
    except (OutputError, OSError) as error:
        refused = error if isinstance(error, OutputError) else cannot_write(path, error)
        if pack == "always":
            raise refused from error
        notes.append(f"{refused.what} Streaming the model file itself, which computes slower.")
        return plain


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
