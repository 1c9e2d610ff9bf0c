"""Loading one model file."""

from __future__ import annotations

from pathlib import Path

from edgespec.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.loading.state import LoadState
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.vocabulary import same_tokens
from edgespec.offload.tables import WeightsBesideTables
from edgespec.planning.plan import Plan


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
    sent_from: int | None = None,
    drafts: bool = False,
) -> Model:
    """A model with all of its weights in memory or mapped.

    Args:
        weights: where the weights are; None is in memory, or mapped.
        devices: which layers are on devices.
        mtp: whether its layers for multi-token prediction are to draft.
        token_texts: whether texts are to be tokenized with it.
        sent_from, drafts: of `Model`.
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
            sent_from=sent_from,
            drafts=drafts,
        )
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    return state.register(model)


def open_drafting_model(
    files: ModelFiles,
    plan: Plan,
    state: LoadState,
    *,
    devices: DeviceLayers = ON_PROCESSOR,
    mtp: bool = False,
) -> Model:
    """A model or a head that drafts; without texts of tokens, if its file lists those of its target.

    Args:
        devices, mtp: as of `open_model`.
    """
    return open_model(
        files.paths[0],
        state,
        memory_map=plan.memory.memory_map,
        weights=WeightsBesideTables(files) if plan.drafter_tables else None,
        devices=devices,
        mtp=mtp,
        token_texts=not same_tokens(plan.target.headers[0], files.headers[0]),
        drafts=True,
    )
