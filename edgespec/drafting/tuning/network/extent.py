"""The extent of training: as much of a drafter as pays, and fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.base.units import readable
from edgespec.drafting.tuning.network.shape import NetworkShape
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.types import GGUFHeader

_FROZEN = ("token_embd.weight", "output.weight", "rope_freqs.weight")
_VALUE, _TRAINED = 4, 12  # bytes of a weight; and of its gradient and AdamW's two moments, all in float32
_WORKING_BYTES = 1 << 30  # activations and logits of a step


@dataclass(frozen=True)
class TrainedExtent:
    """The part of a drafter that is trained."""

    first: int = 0  # layer that is; what the layers below it compute for a text never changes

    def trains(self, name: str) -> bool:
        """True if a tensor of this name is trained."""
        if name in _FROZEN:
            return False
        kind, _, rest = name.partition(".")
        return kind != "blk" or int(rest.partition(".")[0]) >= self.first

    def n_bytes(self, header: GGUFHeader) -> int:
        """Memory that training takes."""
        sizes = {tensor.name: math.prod(tensor.shape) for tensor in header.tensors}
        trained = sum(size for name, size in sizes.items() if self.trains(name))
        return _VALUE * sum(sizes.values()) + _TRAINED * trained + _WORKING_BYTES


WHOLE = TrainedExtent()


def extent_for(header: GGUFHeader, shape: NetworkShape, available: int) -> TrainedExtent:
    """Return the upper half of a drafter's layers, or as many of them as can be trained in free memory."""
    extents = [TrainedExtent(first) for first in range(shape.layers // 2, shape.layers)]
    for extent in extents:
        if extent.n_bytes(header) <= available:
            return extent
    needed = extents[-1].n_bytes(header)
    raise MemoryLimitError(
        f"Tuning {header.path.name} needs about {readable(needed)} of memory; "
        f"{readable(available)} are free.",
        "Name a smaller drafter with --from, or close other programs.",
        needed,
    )
