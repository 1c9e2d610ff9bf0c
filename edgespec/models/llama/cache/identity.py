"""What the bits of a model's cache depend on, besides the tokens: others' keys and values are of no use."""

from __future__ import annotations

from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.models.llama.runtime.model import Model


def cache_identity(header: GGUFHeader, model: Model, **settings: object) -> dict[str, str]:
    """Names the model, its weights, the llama.cpp build with its CPU features, and `settings`.

    The weights are named by the states of the files that they were loaded from (see filestate.py), so any
    write to one of them gives another name. A copy of a model, or one that was moved or touched, has another
    name too: its texts are read once more. The alternative, a hash over all bytes, would cost a pass over
    the disk before the first answer.
    """
    return {
        "model": f"{header.path.name} {header.fingerprint}",
        "weights": ", ".join(map(str, model.states)),
        "build": build_identity(),
        **{name: str(value) for name, value in settings.items()},
    }
