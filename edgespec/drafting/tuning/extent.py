"""The extent of training: as much of a drafter as pays, and fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.drafting.tuning.shape import Shape
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.types import GGUFHeader
from edgespec.units import readable

_FROZEN = ("token_embd.weight", "output.weight", "rope_freqs.weight")
_RANK = 16  # of adapters
SCALES = ".block_scales"  # behind the name of the matrix that they belong to
_LEAST_BLOCK = 32  # weights that share a scale, at least
_VALUE, _TRAINED = 4, 12  # bytes of a weight; and of its gradient and AdamW's two moments, all in float32
_WORKING_BYTES = 1 << 30  # activations and logits of a step


@dataclass(frozen=True)
class Extent:
    """The part of a drafter that is trained.

    Attributes:
        first: the first layer that is; what the layers below it compute for a text never changes.
        rank: of the adapters that are trained in place of the matrices; 0 trains the matrices themselves.
        scales: whether the scales of quantized blocks are trained in place of the matrices.
    """

    first: int = 0
    rank: int = 0
    scales: bool = False

    def trains(self, name: str) -> bool:
        """True if a tensor, or an adapter, of this name is trained."""
        if name in _FROZEN:
            return False
        kind, _, rest = name.partition(".")
        if kind == "blk" and int(rest.partition(".")[0]) < self.first:
            return False
        if self.scales:
            return name.endswith(SCALES) or not _is_matrix(name)
        return not self.rank or ".adapter_" in name

    def n_bytes(self, header: GGUFHeader) -> int:
        """Memory that training takes."""
        weights = sum(math.prod(tensor.shape) for tensor in header.tensors)
        # A matrix is made anew of its scales, and kept until its gradient is known.
        made = self._n_scaled(header) if self.scales else 0
        return _VALUE * (weights + made) + _TRAINED * self._n_trained(header) + _WORKING_BYTES

    def _n_trained(self, header: GGUFHeader) -> int:
        count = 0
        for tensor in header.tensors:
            if self.rank and len(tensor.shape) > 1 and tensor.name.startswith("blk."):
                if self.trains(f"{tensor.name}.adapter_"):
                    count += self.rank * sum(tensor.shape)
            elif self.trains(tensor.name):
                count += math.prod(tensor.shape)
        return count + self._n_scaled(header) // _LEAST_BLOCK * self.scales

    def _n_scaled(self, header: GGUFHeader) -> int:
        """Weights of all matrices whose scales would be trained."""
        return sum(
            math.prod(tensor.shape)
            for tensor in header.tensors
            if _is_matrix(tensor.name) and self.trains(tensor.name + SCALES)
        )


def _is_matrix(name: str) -> bool:
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


WHOLE = Extent()


def extent_for(header: GGUFHeader, shape: Shape, available: int, *, scales: bool = False) -> Extent:
    """Return the part of a drafter that can be trained in the memory that is free.

    Args:
        scales: whether its matrices shall keep their codes.

    Raises:
        MemoryLimitError: nothing of it.
    """
    upper = shape.layers // 2
    if scales:
        extents = [Extent(scales=True), Extent(upper, scales=True)]
    else:
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
