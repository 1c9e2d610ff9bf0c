"""The headers of block heads: draft heads that predict a block of tokens in one pass.

Such a head (llama.cpp's architecture `dflash`) reads the target's hidden states as its keys and values, and a
block of the last token followed by mask tokens. In one pass it gives the logits of every position of the
block (DFlash, a block-diffusion drafter). Its successor DFlash2 scores pairs of candidates, so that a
position depends on the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.errors import PairingError
from edgespec.heads.shared.head import HeadHeader
from edgespec.heads.shared.layer_head import LayerHead, read_fields, read_layers
from edgespec.models.gguf.types import GGUFHeader, as_count

MAX_BLOCK = 64  # positions: the rows of one pass of a head
_USUAL_BLOCK = 16  # where the file does not say


class BlockKind(Enum):
    """The kinds of block heads, by how a position depends on the token before it."""

    DFLASH = "DFlash"  # not at all
    DFLASH2 = "DFlash2"  # by scores of pairs of candidates


@dataclass(frozen=True)
class BlockHead(LayerHead):
    """The header of a block head.

    Attributes:
        kind: of head.
        block_size: positions of a block, the last token's included.
        causal: whether a position sees only those before it.
        mask_token: the token that stands at the positions to predict.
        candidates: of each position whose pairs are scored; 0 for other heads than DFlash2.
    """

    kind: BlockKind
    block_size: int
    causal: bool
    mask_token: int
    candidates: int = 0

    @property
    def n_drafts(self) -> int:
        """Tokens in a row that a pass drafts: each position but the first predicts its own token."""
        return self.block_size - 1


def block_kind(header: GGUFHeader) -> BlockKind:
    """The kind of a block head."""
    names = {tensor.name for tensor in header.tensors}
    return BlockKind.DFLASH2 if "selector_hidden.weight" in names else BlockKind.DFLASH


def read_block_head(header: GGUFHeader) -> BlockHead:
    """Read the header of a block head.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
        PairingError: it is a DSpark head, which is not supported.
    """
    if any(tensor.name.startswith("markov_w") for tensor in header.tensors):
        raise PairingError(
            f"{header.path.name} is a DSpark head, and these are not supported.",
            "Name another head, or an ordinary drafter.",
        )
    head = HeadHeader(header)
    layers, width = read_layers(head), head.count("embedding_length")
    fields = read_fields(head, layers, width, width)
    kind = block_kind(header)
    if kind is BlockKind.DFLASH2:
        _check_selector(head, width)
    mask_token, block_size = _mask_token(head), _block_size(head)
    return BlockHead(
        **fields,
        kind=kind,
        block_size=block_size,
        causal=header.metadata.get(f"{header.architecture}.attention.causal") is True,
        mask_token=mask_token,
        candidates=head.count("selector_top_k") if kind is BlockKind.DFLASH2 else 0,
    )


def _mask_token(head: HeadHeader) -> int:
    token = as_count(head.header.metadata.get("tokenizer.ggml.mask_token_id"))
    if token is None or token >= head.header.n_vocab:
        head.refuse("it does not name the token that masks the positions to predict")
    return token


def _block_size(head: HeadHeader) -> int:
    metadata, key = head.header.metadata, f"{head.header.architecture}.block_size"
    size = as_count(metadata[key]) if key in metadata else _USUAL_BLOCK
    if size is None or not 2 <= size <= MAX_BLOCK:
        head.refuse(f"it drafts blocks of {metadata.get(key)} tokens; 2 to {MAX_BLOCK} are supported")
    return size


def _check_selector(head: HeadHeader, width: int) -> None:
    """Refuse what llama.cpp would assert of a DFlash2 head."""
    group, top_k = head.count("conv_group_size"), head.count("selector_top_k")
    for key in ("conv_kernel_size", "selector_rank", "block_size"):
        head.count(key)
    if width % group or top_k * (top_k + 1) > width:
        head.refuse("its sizes contradict each other")
