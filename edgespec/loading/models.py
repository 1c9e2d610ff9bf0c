"""Loading one model file."""

from __future__ import annotations

from pathlib import Path

from edgespec.loading.state import LoadState
from edgespec.models.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.runtime.weight_store import WeightStore


def open_model(
    path: Path,
    state: LoadState,
    *,
    memory_map: bool,
    repack: bool = True,
    weights: WeightStore | None = None,
    devices: DeviceLayers = ON_PROCESSOR,
    mtp: bool = False,
    token_texts: bool = True,
) -> Model:
    """A model with all of its weights in memory or mapped.

    Args:
        weights: where the weights are; None is in memory, or mapped.
        devices: which layers are on devices.
        mtp: whether its layers for multi-token prediction are to draft.
        token_texts: whether texts are to be tokenized with it.

    Raises:
        ModelFileError, MemoryLimitError: it cannot be loaded.
    """
    state.on_progress(f"Loading {path.name}", 0.0)
    try:
        model = Model(
            path,
            devices=devices,
            memory_map=memory_map,
            repack=repack,
            on_progress=lambda fraction: state.on_progress(f"Loading {path.name}", fraction),
            weights=weights,
            mtp=mtp,
            token_texts=token_texts,
        )
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    return state.register(model)
