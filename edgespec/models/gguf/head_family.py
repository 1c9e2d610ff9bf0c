"""The families of draft heads: files that are of no use without the model that they draft for."""

from __future__ import annotations

from enum import Enum

from edgespec.models.gguf.layers import mtp_count
from edgespec.models.gguf.types import GGUFHeader


class HeadFamily(Enum):
    """The families of heads in files of their own."""

    EAGLE = "EAGLE-3"  # a layer that reads hidden states of its target
    BLOCK = "block"  # drafts a block of tokens in one pass: DFlash and its successors
    ASSISTANT = "assistant"  # looks at its target's keys and values (Gemma 4)
    MTP = "MTP layer"  # its target's own layers for multi-token prediction


_BY_ARCHITECTURE = {
    "eagle3": HeadFamily.EAGLE,
    "dflash": HeadFamily.BLOCK,
    "gemma4-assistant": HeadFamily.ASSISTANT,
}


def head_family(header: GGUFHeader) -> HeadFamily | None:
    """The family of a head, by the header of its first file; None if the file is a model."""
    if _has_only_mtp_layers(header):
        return HeadFamily.MTP
    return _BY_ARCHITECTURE.get(header.architecture)


def _has_only_mtp_layers(header: GGUFHeader) -> bool:
    """True if a file holds layers for multi-token prediction, and no other layer of its model."""
    count = mtp_count(header)
    first = (header.block_count or 0) - count
    if not count or first < 1:
        return False
    layers = {
        int(parts[1])
        for tensor in header.tensors
        if len(parts := tensor.name.split(".")) > 2 and parts[0] == "blk" and parts[1].isdigit()
    }
    return bool(layers) and min(layers) >= first
