"""The headers of EAGLE-3 heads.

Such a head (Li et al. 2025, arXiv 2503.01840) is a single layer that reads the target's own hidden states
instead of the text alone. It is trained for one target and of no use to any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.heads.shared.head import HeadHeader
from edgespec.heads.shared.layer_head import LayerHead, read_fields, read_layers
from edgespec.models.gguf.types import GGUFHeader


@dataclass(frozen=True)
class EagleHead(LayerHead):
    """The header of an EAGLE-3 head."""


def read_eagle_head(header: GGUFHeader) -> EagleHead:
    """Read the header of an EAGLE-3 head.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
    """
    head = HeadHeader(header)
    layers = read_layers(head)
    target_width, width = head.count("target_hidden_size"), head.count("embedding_length")
    if head.count("block_count") != 1:
        head.refuse("it has more than one layer")
    return EagleHead(**read_fields(head, layers, target_width, width))
