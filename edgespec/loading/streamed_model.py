"""Streaming a model as its layout says: the store to read from, and the model with its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.base.progress import Progress, no_progress
from edgespec.base.units import readable
from edgespec.kernels.ggml import Address
from edgespec.llama.runtime.device_layers import DeviceLayers
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import Store
from edgespec.offload.packing.choice import choose_store
from edgespec.offload.packing.division import IN_CACHE, PackFolders
from edgespec.offload.packing.sources import States, check_unchanged, current_states
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory.stream_layout import StreamLayout, streamable


@dataclass
class StreamPlan:
    """A model that is ready to be streamed."""

    files: ModelFiles  # the model, with layers that are on devices
    layout: StreamLayout  # which layers are resident, by what the store holds
    store: Store  # where its layers are read from
    states: States  # of the model's files when the store was chosen
    notes: list[str] = field(default_factory=list)  # sentences that people should read

    def open(
        self,
        on_progress: Progress,
        beside: WeightStore | None = None,
        while_loading: Callable[[], None] = lambda: None,
        sent_to: Address | None = None,
    ) -> StreamedWeights:
        """The weights, to be passed to a Model.

        Args:
            beside, while_loading, sent_to: as for StreamedWeights.

        Raises:
            StreamError, UnsupportedBuild: as StreamedWeights.
        """
        name, placement = self.files.paths[0].name, self.layout.placement
        return StreamedWeights(
            self.files,
            self.store,
            placement.streamed,
            n_slots=placement.n_slots,
            expert_slots=placement.expert_slots,
            n_used=self.layout.weights.n_used,
            sent_to=sent_to,
            beside=beside,
            on_progress=lambda fraction: on_progress(f"Loading {name}", fraction),
            while_loading=while_loading,
        )


def prepare_stream(
    files: ModelFiles,
    layout: StreamLayout,
    pack: str,
    folder: Path,
    on_progress: Progress = no_progress,
    spread: PackFolders = IN_CACHE,
) -> StreamPlan:
    """Get the store that a layout reads from; packs the layers first if that is wanted.

    Where no packed file can be made, the layout follows the store.

    Args:
        files: the model, with layers that are on devices: the packed file has these too.
        pack: "auto" (packs if the disk has room), "always" or "never".
        folder: of packed files.
        spread: the folders that people named for their parts.
    """
    states, notes = current_states(files), list[str]()
    weights = streamable(files, layout.config.memory.experts)
    store = choose_store(files, weights, pack, folder, notes, on_progress, spread)
    if store.packed != layout.packed:
        layout = layout.again(packed=store.packed)
    store = replace(
        store,
        layers={
            layer.index: store.layers[layer.index].only({tensor.name for tensor in layer.tensors})
            for layer in layout.weights.layers
        },
        experts={found.index: store.experts[found.index] for found in layout.weights.experts},
    )
    return StreamPlan(files, layout, store, states, notes + _notes(layout, store, len(files.layers())))


def open_streamed_model(
    path: Path,
    plan: StreamPlan,
    devices: DeviceLayers,
    on_progress: Progress,
    beside: WeightStore | None = None,
    *,
    mtp: bool = False,
    while_loading: Callable[[], None] = lambda: None,
    sent_from: int | None = None,
) -> Model:
    """A model whose layers are held as planned.

    Args:
        devices: which layers are on devices, where the plan has none of them.
        beside, while_loading: as for StreamedWeights.
        mtp: whether its layers for multi-token prediction are to draft; they are in memory.
        sent_from: rows of passes from which on weights are sent to the first of the devices; None for none.
    """
    on_progress(f"Loading {path.name}", 0.0)
    sent_to = None if sent_from is None else devices.devices[0]
    weights = plan.open(on_progress, beside, while_loading, sent_to)
    try:
        model = Model(
            path,
            devices=devices,
            memory_map=False,
            on_progress=lambda _fraction: None,  # so that Ctrl-C is noticed; `weights` reports the progress
            weights=weights,
            mtp=mtp,
            sent_from=sent_from,
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


def _notes(layout: StreamLayout, store: Store, n_layers: int) -> list[str]:
    """Describe what is streamed, in sentences."""
    placement, notes = layout.placement, []
    if placement.streamed:
        streamed = sum(store.layers[index].n_bytes for index in placement.streamed)
        whole = len(store.layers) <= len(layout.files.layers())
        units = f"{n_layers} layers" if whole else f"{len(store.layers)} parts of layers"
        disks = "disk" if store.n_disks == 1 else f"{store.n_disks} disks"
        notes.append(
            f"{len(placement.streamed)} of {units} are streamed from {disks}: {readable(streamed)} per pass."
        )
    if placement.expert_slots:
        notes.append(
            f"{placement.expert_slots} of {layout.weights.n_experts} experts are in memory; a pass reads "
            "missing ones from disk."
        )
    return notes
