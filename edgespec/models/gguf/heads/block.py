"""Block heads: draft heads that predict a block of tokens in one pass (llama.cpp's architecture `dflash`).

Such a head reads the target's hidden states as its keys and values, and a block of the last token followed by
mask tokens. In one pass it gives the logits of every position of the block (DFlash, a block-diffusion
drafter). Two successors make a position depend on the token before it: DSpark adds a bias, the product of two
matrices of low rank (its Markov head). DFlash2 scores pairs of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgespec.errors import PairingError
from edgespec.models.gguf.header_checks import D2T
from edgespec.models.gguf.heads.assistant import is_assistant
from edgespec.models.gguf.heads.eagle import (
    BLOCK_ARCHITECTURE,
    DraftHead,
    count_of,
    damaged,
    drafted_range,
    is_head,
    read_head,
    require_shape,
)
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader, as_count

ASSISTANT = "assistant"
MOST_BLOCK = 64  # positions: the rows of one pass of a head
_USUAL_BLOCK = 16  # where the file does not say


class BlockKind(Enum):
    """The kinds of block heads, by how a position depends on the token before it."""

    DFLASH = "DFlash"  # not at all
    DSPARK = "DSpark"  # by a bias
    DFLASH2 = "DFlash2"  # by scores of pairs of candidates


@dataclass(frozen=True)
class BlockHead(DraftHead):
    """The header of a block head.

    Attributes:
        kind: of head.
        block_size: positions of a block, the last token's included.
        from_anchor: whether the last token's own position predicts the first token of the draft. Otherwise
            each position predicts the token that stands there, so that the first one is of no use.
        causal: whether a position sees only those before it.
    """

    kind: BlockKind
    block_size: int
    from_anchor: bool
    causal: bool

    @property
    def n_drafts(self) -> int:
        """Tokens in a row that a pass drafts."""
        return self.block_size - (not self.from_anchor)


def is_block_head(header: GGUFHeader) -> bool:
    """True if a file is a draft head that predicts a block of tokens at once."""
    return header.architecture == BLOCK_ARCHITECTURE


def block_kind(header: GGUFHeader) -> BlockKind:
    """The kind of a block head."""
    names = {tensor.name for tensor in header.tensors}
    if "selector_hidden.weight" in names:
        return BlockKind.DFLASH2
    return BlockKind.DSPARK if "markov_w1.weight" in names else BlockKind.DFLASH


def head_kind(header: GGUFHeader) -> str:
    """The kind of a draft head, as people call it; empty if the file is none."""
    if is_block_head(header):
        return block_kind(header).value
    if is_assistant(header):
        return ASSISTANT
    return "EAGLE-3" if is_head(header) else ""


def read_any_head(header: GGUFHeader) -> DraftHead:
    """Read the header of a draft head of any kind; a BlockHead if it drafts blocks.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
        PairingError: it is a block head of DeepSeek V4, which is not supported.
    """
    return read_block_head(header) if is_block_head(header) else read_head(header)


def read_block_head(header: GGUFHeader) -> BlockHead:
    """Read the header of a block head.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
        PairingError: it is one of DeepSeek V4, which is not supported.
    """
    if as_count(header.metadata.get(f"{BLOCK_ARCHITECTURE}.hyper_connection.count")):
        raise PairingError(
            f"{header.path.name} is a DSpark head of DeepSeek V4, and these are not supported.",
            "Name another head, or an ordinary drafter.",
        )
    layers = header.metadata.get(f"{BLOCK_ARCHITECTURE}.target_layers")
    if not isinstance(layers, ArrayInfo) or not layers.values:
        damaged(header, "it does not name the layers of its target that it reads")
    width = count_of(header, "embedding_length")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    require_shape(header, tensors, "fc.weight", (len(layers.values) * width, width))
    output, embedding = tensors.get("output.weight"), tensors.get("token_embd.weight")
    n_drafted = drafted_range(header, tensors.get(D2T), output)
    if output is not None:
        require_shape(header, tensors, "output.weight", (width, n_drafted))
    if embedding is not None:
        require_shape(header, tensors, "token_embd.weight", (width, header.n_vocab))
    kind = block_kind(header)
    if kind is BlockKind.DFLASH2:
        _check_selector(header, width)
    elif kind is BlockKind.DSPARK:
        if "markov_w2.scale" in tensors:
            damaged(header, "its Markov head has its own scale, which is not supported")
        rank = tensors["markov_w1.weight"].shape[0]
        require_shape(header, tensors, "markov_w1.weight", (rank, header.n_vocab))
        require_shape(header, tensors, "markov_w2.weight", (rank, n_drafted))
    return BlockHead(
        header,
        layers.values,
        width,
        width,
        n_drafted,
        embedding is None,
        output is None,
        kind,
        _block_size(header),
        kind is BlockKind.DSPARK and _flag(header, "sample_from_anchor", usual=True),
        _flag(header, "attention.causal", usual=False),
    )


def mask_token(header: GGUFHeader) -> int:
    """The token that stands at the positions to predict.

    Raises:
        ModelFileError: the file names none.
    """
    token = as_count(header.metadata.get("tokenizer.ggml.mask_token_id"))
    if token is None or token >= header.n_vocab:
        damaged(header, "it does not name the token that masks the positions to predict")
    return token


def selector_candidates(header: GGUFHeader) -> int:
    """Candidates of each position that a DFlash2 head scores in pairs; 0 for other heads."""
    return as_count(header.metadata.get(f"{BLOCK_ARCHITECTURE}.selector_top_k")) or 0


def _block_size(header: GGUFHeader) -> int:
    key = f"{BLOCK_ARCHITECTURE}.block_size"
    size = as_count(header.metadata[key]) if key in header.metadata else _USUAL_BLOCK
    mask_token(header)
    if size is None or not 2 <= size <= MOST_BLOCK:
        damaged(
            header, f"it drafts blocks of {header.metadata.get(key)} tokens; 2 to {MOST_BLOCK} are supported"
        )
    return size


def _check_selector(header: GGUFHeader, width: int) -> None:
    """Refuse what llama.cpp would assert of a DFlash2 head."""
    group = count_of(header, "conv_group_size")
    top_k = count_of(header, "selector_top_k")
    for key in ("conv_kernel_size", "selector_rank", "block_size"):
        count_of(header, key)
    if width % group or top_k * (top_k + 1) > width:
        damaged(header, "its sizes contradict each other")


def _flag(header: GGUFHeader, key: str, *, usual: bool) -> bool:
    value = header.metadata.get(f"{BLOCK_ARCHITECTURE}.{key}", usual)
    return value if isinstance(value, bool) else usual
