"""Planning how a model's weights are streamed, and opening the model as planned."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock

from edgespec.errors import MemoryLimitError, OutputError
from edgespec.files.writing import remove_abandoned
from edgespec.kernels import ggml
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.layouts import kernel_layout
from edgespec.machine.disks import TMPFS, disk_of
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.model import Model
from edgespec.offload.layout import Store, plain_store
from edgespec.offload.packing.build import build_pack, cannot_write
from edgespec.offload.packing.pack import StalePack, gains_from_packing, open_pack, pack_path, packed_bytes
from edgespec.offload.packing.sources import States, check_unchanged, current_states
from edgespec.offload.planning.placement import Placement, place
from edgespec.offload.weights import StreamedWeights
from edgespec.progress import Progress, no_progress
from edgespec.units import readable

PACK_MODES = ("auto", "always", "never")

_SPARE_DISK = 1 << 30  # to leave free on the disk when packing


@dataclass
class StreamPlan:
    """How one model will be streamed.

    Attributes:
        files: the model.
        store: where its layers are read from.
        placement: which layers are resident.
        other_bytes: memory for the weights outside the layers.
        states: of the model's files when this was planned.
        notes: sentences that people should read.
    """

    files: ModelFiles
    store: Store
    placement: Placement
    other_bytes: int
    states: States
    notes: list[str] = field(default_factory=list)

    @property
    def kernels_differ(self) -> bool:
        """Whether different kernels run than for the same model in memory."""
        return not self.store.packed and gains_from_packing(self.files.layers())

    def open(self, on_progress: Progress) -> StreamedWeights:
        """The weights, to be passed to a Model.

        Raises:
            StreamError, UnsupportedBuild: as StreamedWeights.
        """
        name = self.files.paths[0].name
        return StreamedWeights(
            self.files,
            self.store,
            self.placement.streamed,
            n_slots=self.placement.n_slots,
            on_progress=lambda fraction: on_progress(f"Loading {name}", fraction),
        )


def open_streamed_model(path: Path, plan: StreamPlan, gpu_layers: int, on_progress: Progress) -> Model:
    """A model whose layers are held as planned.

    Raises:
        ModelFileError: llama.cpp cannot load it.
        StreamError: its layers cannot be read, or its files have changed since it was planned.
    """
    on_progress(f"Loading {path.name}", 0.0)
    weights = plan.open(on_progress)
    try:
        model = Model(
            path,
            gpu_layers=gpu_layers,
            memory_map=False,
            on_progress=lambda _fraction: None,  # so that Ctrl-C is noticed; `weights` reports the progress
            weights=weights,
        )
    except BaseException:
        weights.close()
        raise
    try:
        check_unchanged(plan.files, plan.states)  # or its parts could come from two versions
    except BaseException:
        model.close()
        raise
    return model


def check_supported() -> None:
    """Make sure that weights can be streamed on this system with this llama.cpp build.

    Raises:
        UnsupportedBuild: they cannot; the text says why.
    """
    if os.name != "posix" or not hasattr(os, "preadv"):
        raise UnsupportedBuild("this system lacks the reads it needs")
    start_backend()
    ggml.check()


def plan_stream(
    files: ModelFiles,
    *,
    budget: int,
    fixed: int,
    process: int,
    pack: str,
    pack_folder: Path,
    gpu_layers: int = 0,
    n_slots: int | None = None,
    on_progress: Progress = no_progress,
) -> StreamPlan:
    """Decide which layers to stream, and from where; packs the layers first if that is wanted.

    Args:
        budget: bytes that may be used in total.
        fixed: bytes of all but this model's weights.
        process: the part of `fixed` that is in use before the model is loaded.
        pack: "auto" (packs if the disk has room), "always" or "never".

    Raises:
        UnsupportedBuild: streaming does not work here, or the model has no layers.
        MemoryLimitError: the budget is too small.
        OutputError: the packed file cannot be written, with "always".
        StreamError: the model cannot be read.
    """
    check_supported()
    layers = _streamable(files, gpu_layers)
    if not layers:
        raise UnsupportedBuild(f"'{files.paths[0].name}' has no layers to stream")
    notes: list[str] = []
    states = current_states(files)
    beside = files.tensor_bytes - sum(layer.n_bytes for layer in files.layers())
    other = beside + tied_bytes(files)
    pack, pack_bytes = _packing_in_memory(files, pack, pack_folder, notes)

    def placed(sizes: dict[int, int]) -> Placement:
        # A tensor that is rearranged during loading is in memory twice.
        return place(
            sizes,
            budget=budget,
            fixed=fixed + other + pack_bytes,
            loading=process + other + largest_beside(files),
            n_slots=n_slots,
        )

    # Fail before packing, which takes minutes for a large model.
    try:
        placed({layer.index: layer.n_bytes for layer in layers})
    except MemoryLimitError as error:
        if not pack_bytes:
            raise
        raise MemoryLimitError(
            f"{error.what} The packed layer file takes {readable(pack_bytes)} of that, as '{pack_folder}' "
            "lies in memory.",
            "Set XDG_CACHE_HOME to a folder on a disk, or use --pack never.",
            least=error.least,
        ) from error
    store = _store(files, pack, pack_folder, notes, on_progress)
    chosen = {layer.index: store.layers[layer.index] for layer in layers}
    placement = placed({index: stored.n_bytes for index, stored in chosen.items()})
    if placement.streamed:
        streamed = sum(chosen[index].n_bytes for index in placement.streamed)
        notes.append(
            f"{len(placement.streamed)} of {len(files.layers())} layers are streamed from disk: "
            f"{readable(streamed)} a pass."
        )
    return StreamPlan(files, replace(store, layers=chosen), placement, other, states, notes)


def _packing_in_memory(files: ModelFiles, pack: str, folder: Path, notes: list[str]) -> tuple[str, int]:
    """Whether to pack even if the folder is in memory, and the memory that the packed file then takes."""
    if pack == "never" or disk_of(folder).kind != TMPFS:
        return pack, 0
    if pack == "always":
        return pack, packed_bytes(files.layers())
    if gains_from_packing(files.layers()):
        notes.append(
            f"No packed layer file is used, as '{folder}' lies in memory: the model file itself is streamed, "
            "which computes slower. Set XDG_CACHE_HOME to a folder on a disk."
        )
    return "never", 0


def _streamable(files: ModelFiles, gpu_layers: int) -> list[Layer]:
    """The layers that are not on the GPU, which gets the last ones."""
    count = files.headers[0].block_count or 0
    first_on_gpu = 0 if gpu_layers < 0 else max(count - gpu_layers, 0)
    return [layer for layer in files.layers() if gpu_layers == 0 or layer.index < first_on_gpu]


def stored_sizes(files: ModelFiles) -> dict[int, int]:
    """Bytes that each layer takes in memory, rearranged if there is a kernel layout for it."""
    layers = files.layers()
    if gains_from_packing(layers):
        return {layer.index: packed_bytes([layer]) - packed_bytes([]) for layer in layers}
    return {index: stored.n_bytes for index, stored in plain_store(files, layers).layers.items()}


def largest_beside(files: ModelFiles) -> int:
    """Bytes of the largest tensor outside the layers."""
    layers = {tensor.name for layer in files.layers() for tensor in layer.tensors}
    return max(
        (t.n_bytes for header in files.headers for t in header.tensors if t.name not in layers), default=0
    )


def tied_bytes(files: ModelFiles) -> int:
    """Memory for a tied embedding's second copy: one is for looking rows up, one rearranged for products."""
    tensors = {tensor.name: tensor for header in files.headers for tensor in header.tensors}
    embedding = tensors.get("token_embd.weight")
    tied = embedding is not None and "output.weight" not in tensors
    if not tied or embedding is None or not kernel_layout(embedding.type_id, embedding.shape):
        return 0
    return embedding.n_bytes


def _store(files: ModelFiles, pack: str, folder: Path, notes: list[str], on_progress: Progress) -> Store:
    layers = files.layers()
    plain = plain_store(files, layers)
    remove_abandoned(folder)  # killed packing leaves files as large as the model
    if pack == "never" or (pack == "auto" and not gains_from_packing(layers)):
        return plain
    path = pack_path(folder, files)

    def check(fraction: float) -> None:
        on_progress(f"Comparing {files.paths[0].name} with what was packed (its file is another)", fraction)

    try:
        with suppress(StalePack):
            return open_pack(path, files, check)
        folder.mkdir(parents=True, exist_ok=True)
        on_progress(f"Waiting to pack {files.paths[0].name}", 0.0)
        with FileLock(path.with_suffix(".lock")):  # two processes at once would need twice the space
            with suppress(StalePack):
                return open_pack(path, files, check)  # another process has made it
            needed = packed_bytes(layers)
            free = _free_disk(folder) + (path.stat().st_size if path.exists() else 0)
            if pack == "auto" and free < needed + _SPARE_DISK:
                notes.append(
                    f"The packed layer file would take {readable(needed)} of disk, and {readable(free)} are "
                    "free: streaming the model file itself, which computes slower."
                )
                return plain
            path.unlink(missing_ok=True)  # it is stale, and its space is needed
            what = f"Packing {files.paths[0].name} for this CPU (once, {readable(needed)})"
            return build_pack(path, files, layers, lambda fraction: on_progress(what, fraction))
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
