"""Facts in a projector's header: its size, and what an image takes where that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.base.units import readable
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
_CHILD_BYTES = 144 << 20  # of the process that reads images: Python, its libraries and the picture's pixels
_UNKNOWN_BUFFERS = 128 << 20  # of llama.cpp, where the number of patches does not follow from the header
_COPIES = 10  # of the embeddings in both processes, while one hands them to the other


@dataclass(frozen=True)
class ProjectorFacts:
    name: str  # of its file
    n_bytes: int  # of its file
    kind: str  # such as "gemma3"
    # of a typical picture, without marks around it; None if they do not follow from the header
    tokens: int | None
    # bytes that llama.cpp computes such a picture in, and embeddings are handed over in
    buffers: int = _UNKNOWN_BUFFERS

    @classmethod
    def of(cls, header: GGUFHeader) -> ProjectorFacts:
        kind = kind_of(header)
        division = _division(header.metadata, kind)
        if division is None:
            return cls(header.path.name, header.file_bytes, kind, None)
        return cls(
            header.path.name,
            header.file_bytes,
            kind,
            division.parts * division.rows,
            _buffers(header, division),
        )

    @property
    def reading_bytes(self) -> int:
        """Memory that reading such a picture takes, most of it in a process that ends then."""
        return self.n_bytes + self.buffers + _CHILD_BYTES

    @property
    def reserved(self) -> str:
        """A sentence that names the part of the memory limit that is kept for reading images."""
        return f"{readable(self.reading_bytes)} are reserved for reading an image with {self.name}."

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.n_bytes,
            "type": self.kind,
            "tokens": self.tokens,
            "of_pixels": list(TYPICAL),
            "reading_bytes": self.reading_bytes,
        }


@dataclass(frozen=True)
class _Division:
    """The division of a typical picture by a projector."""

    parts: int  # that are read one by one
    patches: int  # of each part
    rows: int  # of embeddings that each becomes


def _division(metadata: Mapping[str, Any], kind: str) -> _Division | None:
    """The division of a typical picture; None if it does not follow from the header."""

    def number(name: str, otherwise: int = 0) -> int:
        return _number(metadata, name) or otherwise

    side, patch = number("image_size"), number("patch_size")
    if not patch or f"clip.vision.{_GRID}" in metadata:
        return None
    if kind in _DYNAMIC:
        rows = math.prod(round(length / (2 * patch)) for length in TYPICAL)
        if rows > _MAX_DYNAMIC:
            smaller = math.sqrt(math.prod(TYPICAL) / _MAX_DYNAMIC)  # pixels for a side of a token
            rows = math.prod(int(length / smaller) for length in TYPICAL)
        return _Division(1, 4 * rows, rows)
    merged = number("projector.scale_factor", _MERGED.get(kind, 0))
    if not side or not merged or kind not in (*_FIXED, _DIVIDED):
        return None
    patches = (side // patch) ** 2
    if kind in _FIXED:
        return _Division(1, patches, patches // merged**2)
    longest = number(_LONGEST)
    if not longest:  # older files, which do not say how images are divided
        return None
    parts = math.prod(math.ceil(longest * length / max(TYPICAL) / side) for length in TYPICAL)
    return _Division(1 + parts, patches, patches // merged**2)  # the whole picture, and its parts


def _number(metadata: Mapping[str, Any], name: str) -> int:
    """A size of the encoder; 0 if the header does not state it as one."""
    value = metadata.get(f"clip.vision.{name}")
    return value if isinstance(value, int) and value > 0 else 0


def _buffers(header: GGUFHeader, division: _Division) -> int:
    """Bytes of the activations of one part, and of the embeddings of all parts.

    Attention is computed piece by piece, so only what the layers hand on is kept: rows as wide as the encoder
    and as the inner part of its layers.
    """

    width, inner, output = (
        _number(header.metadata, name)
        for name in ("embedding_length", "feed_forward_length", "projection_dim")
    )
    activations = division.patches * (2 * width + inner)
    embeddings = division.parts * division.rows * output
    return 4 * (activations + _COPIES * embeddings)
