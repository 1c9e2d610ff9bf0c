"""Planning how a model's weights are streamed, and opening the model as planned."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.errors import MemoryLimitError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.layouts import kernel_layout, looks_up_rows
from edgespec.models.gguf.experts import LayerWeights, layer_weights
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.device_layers import DeviceLayers
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.residency import Residency
from edgespec.offload.layout import EXPERT_PIECE_BYTES, Store, plain_store
from edgespec.offload.packing.choice import choose_store, packing_in_memory
from edgespec.offload.packing.pack import gains_from_packing, record_places, tensor_places
from edgespec.offload.packing.sources import States, check_unchanged, current_states
from edgespec.offload.planning.placement import Placement, PoolSizes, place, place_with_experts
from edgespec.offload.weights import StreamedWeights
from edgespec.progress import Progress, no_progress
from edgespec.units import readable

PACK_MODES = ("auto", "always", "never")

# Beside each expert in memory, kernels keep the rows that it is multiplied by: an entry for each choice that
# the rows of a pass can make, and a few counters.
_CHOICE_BYTES, _COUNTER_BYTES = 8, 80
_READ_BYTES = 512  # to remember a part of an expert that was read, and its checksum


@dataclass
class StreamPlan:
    """How one model will be streamed.

    Attributes:
        files: the model.
        store: where its layers are read from.
        placement: which layers are resident.
        other_bytes: memory for the weights outside the layers.
        n_used: experts of each layer that a token needs, if single experts are streamed.
        states: of the model's files when this was planned.
        notes: sentences that people should read.
    """

    files: ModelFiles
    store: Store
    placement: Placement
    other_bytes: int
    states: States
    n_used: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def kernels_differ(self) -> bool:
        """Whether different kernels run than for the same model in memory."""
        return not self.store.packed and gains_from_packing(self.files.layers())

    def open(self, on_progress: Progress, beside: Residency | None = None) -> StreamedWeights:
        """The weights, to be passed to a Model.

        Args:
            beside: as for StreamedWeights.

        Raises:
            StreamError, UnsupportedBuild: as StreamedWeights.
        """
        name = self.files.paths[0].name
        return StreamedWeights(
            self.files,
            self.store,
            self.placement.streamed,
            n_slots=self.placement.n_slots,
            expert_slots=self.placement.expert_slots,
            n_used=self.n_used,
            beside=beside,
            on_progress=lambda fraction: on_progress(f"Loading {name}", fraction),
        )


def open_streamed_model(
    path: Path,
    plan: StreamPlan,
    devices: DeviceLayers,
    on_progress: Progress,
    beside: Residency | None = None,
) -> Model:
    """A model whose layers are held as planned.

    Args:
        devices: which layers are on devices, where the plan has none of them.
        beside: as for StreamedWeights.

    Raises:
        ModelFileError: llama.cpp cannot load it.
        StreamError: its layers cannot be read, or its files have changed since it was planned.
    """
    on_progress(f"Loading {path.name}", 0.0)
    weights = plan.open(on_progress, beside)
    try:
        model = Model(
            path,
            devices=devices,
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
    on_devices: int = 0,
    n_slots: int | None = None,
    experts: str = "auto",
    n_rows: int = 1,
    on_progress: Progress = no_progress,
) -> StreamPlan:
    """Decide which layers to stream, and from where; packs the layers first if that is wanted.

    Args:
        budget: bytes that may be used in total.
        fixed: bytes of all but this model's weights.
        process: the part of `fixed` that is in use before the model is loaded.
        pack: "auto" (packs if the disk has room), "always" or "never".
        on_devices: the last layers, which are on devices.
        experts: "auto" streams single experts of a mixture of experts, "never" whole layers.
        n_rows: most rows of a pass.

    Raises:
        UnsupportedBuild: streaming does not work here, or the model has no layers.
        MemoryLimitError: the budget is too small.
        OutputError: the packed file cannot be written, with "always".
        StreamError: the model cannot be read.
    """
    check_supported()
    layers = _streamable(files, on_devices)
    if not layers:
        raise UnsupportedBuild(f"'{files.paths[0].name}' has no layers to stream")
    weights, chosen = _weights(files, None, experts), _weights(files, layers, experts)
    notes: list[str] = []
    states = current_states(files)
    beside = files.tensor_bytes - sum(layer.n_bytes for layer in files.layers())
    other = beside + tied_bytes(files)
    pack, pack_bytes = packing_in_memory(files, weights, pack, pack_folder, notes)

    def placed(store: Store) -> Placement:
        # A tensor that is rearranged during loading is in memory twice.
        return place_weights(
            {layer.index: store.layers[layer.index].n_bytes for layer in chosen.layers},
            pool_sizes(chosen, max((found.n_bytes for found in store.experts.values()), default=0), n_rows),
            budget=budget,
            fixed=fixed + other + pack_bytes,
            loading=process + other + largest_beside(files),
            n_slots=n_slots,
        )

    # Fail before packing, which takes minutes for a large model.
    try:
        placed(plain_store(files, chosen.layers, chosen.experts))
    except MemoryLimitError as error:
        if not pack_bytes:
            raise
        raise MemoryLimitError(
            f"{error.what} The packed layer file takes {readable(pack_bytes)} of that, as '{pack_folder}' "
            "lies in memory.",
            "Set XDG_CACHE_HOME to a folder on a disk, or use --pack never.",
            least=error.least,
        ) from error
    store = choose_store(files, weights, pack, pack_folder, notes, on_progress)
    store = replace(
        store,
        layers={layer.index: store.layers[layer.index] for layer in chosen.layers},
        experts={found.index: store.experts[found.index] for found in chosen.experts},
    )
    placement = placed(store)
    notes += _placement_notes(placement, store, chosen, len(files.layers()))
    return StreamPlan(files, store, placement, other, states, chosen.n_used, notes)


def place_weights(
    layers: dict[int, int],
    pool: PoolSizes | None,
    *,
    budget: int,
    fixed: int,
    loading: int,
    n_slots: int | None = None,
) -> Placement:
    """The placement of layers, and of single experts if there is a pool of them; see `placement`.

    Raises:
        MemoryLimitError: the budget is too small.
    """
    if pool is None:
        return place(layers, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)
    return place_with_experts(layers, pool, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)


def pool_sizes(weights: LayerWeights, slot_bytes: int, n_rows: int) -> PoolSizes | None:
    """What a pool for single experts takes; None if none are streamed.

    Args:
        slot_bytes: of the largest expert.
        n_rows: most rows of a pass.
    """
    if not weights.experts:
        return None
    # A long piece of a prompt may need all experts of a layer at once.
    return PoolSizes(
        slot_bytes + n_rows * weights.n_used * _CHOICE_BYTES + _COUNTER_BYTES,
        fewest=max(found.n_experts for found in weights.experts),
        most=weights.n_experts,
        beside=weights.n_experts * (3 + slot_bytes // EXPERT_PIECE_BYTES) * _READ_BYTES,
    )


def _weights(files: ModelFiles, layers: list[Layer] | None, experts: str) -> LayerWeights:
    if experts == "never":
        return LayerWeights(files.layers() if layers is None else tuple(layers))
    return layer_weights(files, layers)


def _placement_notes(placement: Placement, store: Store, weights: LayerWeights, n_layers: int) -> list[str]:
    """What is streamed, in sentences."""
    notes = []
    if placement.streamed:
        streamed = sum(store.layers[index].n_bytes for index in placement.streamed)
        notes.append(
            f"{len(placement.streamed)} of {n_layers} layers are streamed from disk: "
            f"{readable(streamed)} a pass."
        )
    if placement.expert_slots:
        notes.append(
            f"{placement.expert_slots} of {weights.n_experts} experts are in memory at a time; those that a "
            "pass misses are read from disk."
        )
    return notes


def _streamable(files: ModelFiles, on_devices: int) -> list[Layer]:
    """The layers that are not on devices, which get the last ones."""
    first_there = (files.headers[0].block_count or 0) - on_devices
    return [layer for layer in files.layers() if not on_devices or layer.index < first_there]


def stored_sizes(files: ModelFiles, weights: LayerWeights) -> tuple[dict[int, int], int]:
    """Bytes that each layer takes in memory, and the largest expert, rearranged where kernels want it."""
    if gains_from_packing(files.layers()):
        layers = {layer.index: tensor_places(layer)[1] for layer in weights.layers}
        return layers, max((record_places(found)[1] for found in weights.experts), default=0)
    store = plain_store(files, weights.layers, weights.experts)
    layers = {index: stored.n_bytes for index, stored in store.layers.items()}
    return layers, max((stored.n_bytes for stored in store.experts.values()), default=0)


def largest_beside(files: ModelFiles) -> int:
    """Bytes of the largest tensor outside the layers."""
    layers = {tensor.name for layer in files.layers() for tensor in layer.tensors}
    return max(
        (t.n_bytes for header in files.headers for t in header.tensors if t.name not in layers), default=0
    )


def tied_bytes(files: ModelFiles) -> int:
    """Memory for a tied embedding's second copy: one is for looking rows up, one rearranged for products.

    Where rows can be looked up in the rearranged one, there is none.
    """
    tensors = {tensor.name: tensor for header in files.headers for tensor in header.tensors}
    embedding = tensors.get("token_embd.weight")
    tied = embedding is not None and "output.weight" not in tensors
    if not tied or embedding is None:
        return 0
    layout = kernel_layout(embedding.type_id, embedding.shape)
    one_serves = layout is None or looks_up_rows(layout, embedding.type_id, embedding.shape)
    return 0 if one_serves else embedding.n_bytes
