"""The identity of a model's cache: everything but the tokens that its bits depend on."""

from __future__ import annotations

from edgespec.llama.runtime.backend import build_identity
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.types import GGUFHeader


def cache_identity(header: GGUFHeader, model: Model, **settings: object) -> dict[str, str]:
    """The model, its weights, the llama.cpp build with its CPU features, and `settings`.

    The weights are identified by the states of their files (see files.state), so any write to one of them
    gives another identity. So does copying, moving or touching the model: its texts are then read again. The
    alternative, a hash over all weights, would mean reading all of the files before the first answer.
    """
    return {
        "model": f"{header.path.name} {header.fingerprint}",
        "weights": ", ".join(map(str, model.states)),
        "build": build_identity(),
        **{name: str(value) for name, value in settings.items()},
    }
