"""Facts in a projector's header: its size, and the tokens of an image where they follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edgespec.images.projector import kind_of
from edgespec.models.gguf.types import GGUFHeader

TYPICAL = (1024, 768)
"""Width and height, in pixels, of the picture whose tokens are told."""

_FIXED = ("mlp", "mlp_norm", "gemma3")  # every image is scaled to one size
_GRID, _LONGEST = "image_grid_pinpoints", "preproc_image_size"
_DIVIDED = "idefics3"
_DYNAMIC = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
_MAX_DYNAMIC = 4096  # tokens, to which larger images are scaled down
_MERGED = {
    "gemma3": 4,
    "mlp": 1,
    "mlp_norm": 1,
}  # patches of each side that become one row, if it is not said
_CHILD_BYTES = 160 << 20  # of the process that reads images, without the projector


@dataclass(frozen=True)
class ProjectorFacts:
    """A projector.

    Attributes:
        name: of its file.
        n_bytes: of its file.
        kind: such as "gemma3".
        tokens: of a typical picture, without marks around it; None if they do not follow from the header.
    """

    name: str
    n_bytes: int
    kind: str
    tokens: int | None

    @classmethod
    def of(cls, header: GGUFHeader) -> ProjectorFacts:
        """What a header says."""
        kind = kind_of(header)
        return cls(header.path.name, header.file_bytes, kind, _tokens(header.metadata, kind))

    @property
    def reading_bytes(self) -> int:
        """Memory that reading an image takes at least, in a process that ends then."""
        return self.n_bytes + _CHILD_BYTES

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "name": self.name,
            "bytes": self.n_bytes,
            "type": self.kind,
            "tokens": self.tokens,
            "of_pixels": list(TYPICAL),
            "reading_bytes": self.reading_bytes,
        }


def _tokens(metadata: dict[str, Any], kind: str) -> int | None:
    def number(name: str, otherwise: int = 0) -> int:
        value = metadata.get(f"clip.vision.{name}")
        return value if isinstance(value, int) and value > 0 else otherwise

    side, patch = number("image_size"), number("patch_size")
    if not patch or f"clip.vision.{_GRID}" in metadata:
        return None
    if kind in _DYNAMIC:
        tokens = math.prod(round(length / (2 * patch)) for length in TYPICAL)
        if tokens <= _MAX_DYNAMIC:
            return tokens
        smaller = math.sqrt(math.prod(TYPICAL) / _MAX_DYNAMIC)  # pixels of the picture for a side of a token
        return math.prod(int(length / smaller) for length in TYPICAL)
    merged = number("projector.scale_factor", _MERGED.get(kind, 0))
    if not side or not merged or kind not in (*_FIXED, _DIVIDED):
        return None
    rows = (side // patch) ** 2 // merged**2
    if kind in _FIXED:
        return rows
    longest = number(_LONGEST)
    if not longest:  # older files, which do not say how images are divided
        return None
    parts = math.prod(math.ceil(longest * length / max(TYPICAL) / side) for length in TYPICAL)
    return rows * (1 + parts)  # the whole picture, and its parts
