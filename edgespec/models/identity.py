"""What the bits of a model's cache depend on, besides the tokens: others' keys and values are of no use."""

from __future__ import annotations

import hashlib

from edgespec.models.gguf import GGUFHeader
from edgespec.models.runtime import build_identity

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def cache_identity(header: GGUFHeader, **settings: object) -> dict[str, str]:
    """Names the model, the llama.cpp build with its CPU features, and `settings`.

    Raises:
        OSError: the model's file cannot be read.
    """
    return {
        "model": f"{header.path.name} {header.fingerprint} {_weights_sample(header)}",
        "build": build_identity(),
        **{name: str(value) for name, value in settings.items()},
    }


def _weights_sample(header: GGUFHeader) -> str:
    """A hash over small pieces of the weights: two trainings of one model have the same header."""
    digest = hashlib.blake2b(str(header.file_bytes).encode(), digest_size=8)
    step = max((header.file_bytes - header.data_offset) // _SAMPLES, 1)
    with header.path.open("rb") as file:
        for at in range(header.data_offset, header.file_bytes, step):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
