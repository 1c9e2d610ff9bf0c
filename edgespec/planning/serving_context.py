"""The default context of a server: agents send 6,000 to 28,000 tokens."""

from __future__ import annotations

from edgespec.models.gguf.footprint import cell_bytes
from edgespec.models.gguf.types import GGUFHeader

_SHARE = 10  # of the memory that may be used, one part may hold the cache
_STEP = 1024  # tokens


def serving_context(header: GGUFHeader, usual: int, budget: int, kv: str) -> int:
    """Return as many tokens as the model was trained for, if a tenth of the memory holds them.

    Args:
        usual: tokens that are served in any case.
        budget: bytes that may be used.
        kv: type of cached keys and values, of CACHE_TYPES.
    """
    trained, each = header.context_length or usual, cell_bytes(header, kv)
    held = trained if not each else budget // _SHARE // each
    return max(usual, trained if trained <= held else held // _STEP * _STEP)
