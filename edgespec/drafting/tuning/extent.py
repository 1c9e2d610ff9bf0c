"""How much of a drafter is trained: as much as pays, and fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.drafting.tuning.shape import Shape
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.types import GGUFHeader
from edgespec.units import readable

_FROZEN = ("token_embd.weight", "output.weight", "rope_freqs.weight")
_RANK = 16  # of adapters
_VALUE, _TRAINED = 4, 12  # bytes of a weight; and of its gradient and AdamW's two moments, all in float32
_WORKING_BYTES = 1 << 30  # activations and logits of a step


@dataclass(frozen=True)
class Extent:
    """What of a drafter is trained.

    Attributes:
        first: the first layer that is; what the layers below it compute for a text never changes.
        rank: of the adapters that are trained in place of the matrices; 0 trains the matrices themselves.
    """

    first: int = 0
    rank: int = 0

    def trains(self, name: str) -> bool:
        """Whether a tensor, or an adapter, of this name is trained."""
        if name in _FROZEN:
            return False
        kind, _, rest = name.partition(".")
        if kind == "blk" and int(rest.partition(".")[0]) < self.first:
            return False
        return not self.rank or ".adapter_" in name

    def n_bytes(self, header: GGUFHeader) -> int:
        """Memory that training takes."""
        weights = sum(math.prod(tensor.shape) for tensor in header.tensors)
        return _VALUE * weights + _TRAINED * self._n_trained(header) + _WORKING_BYTES

    def _n_trained(self, header: GGUFHeader) -> int:
        count = 0
        for tensor in header.tensors:
            if self.rank and len(tensor.shape) > 1 and tensor.name.startswith("blk."):
                if self.trains(f"{tensor.name}.adapter_"):
                    count += self.rank * sum(tensor.shape)
            elif self.trains(tensor.name):
                count += math.prod(tensor.shape)
        return count


WHOLE = Extent()


def extent_for(header: GGUFHeader, shape: Shape, available: int) -> Extent:
    """What can be trained of a drafter in the memory that is free.

    Raises:
        MemoryLimitError: nothing of it.
    """
    upper = shape.layers // 2
    extents = [Extent(upper), Extent(upper, _RANK)]
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
