"""The headers of block heads: draft heads that predict a block of tokens in one pass.

Such a head (llama.cpp's architecture `dflash`) reads the target's hidden states as its keys and values, and a
block of the last token followed by mask tokens. In one pass it gives the logits of every position of the
block (DFlash, a block-diffusion drafter). Its successor DFlash2 scores pairs of candidates, so that a
position depends on the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from edgespec.errors import PairingError
from edgespec.heads.head import HeadHeader, LayerHead, read_fields, read_layers
from edgespec.heads.head_context import HeadContext
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import EncoderBatch, TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader, as_count
from edgespec.speculation.tree import FloatArray, IntArray

MAX_BLOCK = 64  # positions: the rows of one pass of a head
_USUAL_BLOCK = 16  # where the file does not say


class BlockKind(Enum):
    """The kinds of block heads, by how a position depends on the token before it."""

    DFLASH = "DFlash"  # not at all
    DFLASH2 = "DFlash2"  # by scores of pairs of candidates


@dataclass(frozen=True)
class BlockHead(LayerHead):
    kind: BlockKind  # of head
    block_size: int  # positions of a block, the last token's included
    causal: bool  # whether a position sees only those before it
    mask_token: int  # the token that stands at the positions to predict
    candidates: int = 0  # of each position whose pairs are scored; 0 for other heads than DFlash2

    @property
    def n_drafts(self) -> int:
        """Tokens in a row that a pass drafts: each position but the first predicts its own token."""
        return self.block_size - 1


def block_kind(header: GGUFHeader) -> BlockKind:
    names = {tensor.name for tensor in header.tensors}
    return BlockKind.DFLASH2 if "selector_hidden.weight" in names else BlockKind.DFLASH


def read_block_head(header: GGUFHeader) -> BlockHead:
    """Read the header of a block head.

    Raises:
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


class BlockLogits(Protocol):
    """The logits after nodes of a tree."""

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        """(nodes, n_vocab) the logits after nodes, not to be changed.

        Args:
            depth: of the nodes; the root's is 0.
            tokens: (nodes,) theirs.
        """


class IndependentLogits(BlockLogits):
    """Each position by itself.

    Args:
        logits: (drafts, n_vocab) of the positions behind the root.
    """

    def __init__(self, logits: FloatArray) -> None:
        self._logits = logits

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        row = self._logits[depth]
        return np.broadcast_to(row, (len(tokens), len(row)))


class PairedLogits(BlockLogits):
    """A few candidates of each position, scored by the candidate before (DFlash2).

    Args:
        candidates: (drafts, candidates) token ids.
        scores: (drafts, candidates, candidates) of each candidate of the position before, those of this
            position's.
        n_vocab: tokens that are drafted.
    """

    def __init__(self, candidates: FloatArray, scores: FloatArray, n_vocab: int) -> None:
        self._candidates, self._scores = candidates.astype(np.int32), scores
        self._n_vocab = n_vocab

    def after(self, depth: int, tokens: IntArray) -> FloatArray:
        found = np.full((len(tokens), self._n_vocab), -np.inf, dtype=np.float32)
        # Tokens from other sources may be no candidates: then the average must do.
        scores = np.repeat(self._scores[depth].mean(axis=0)[None], len(tokens), axis=0)
        if depth:
            nodes, places = np.nonzero(tokens[:, None] == self._candidates[depth - 1])
            scores[nodes] = self._scores[depth, places]
        drafted = self._candidates[depth] < self._n_vocab
        found[:, self._candidates[depth][drafted]] = scores[:, drafted]
        return found


class BlockContext(HeadContext):
    """A context of a block head beside its target's.

    The features that enter its cache are the target's hidden states as they are.

    Attributes:
        head: its header.
        width: elements of a token's features: those of all layers that it reads.

    Raises:
        UnsupportedBuild: this llama.cpp build has no heads.
    """

    def __init__(
        self,
        model: Model,
        beside: Context,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        self.head: BlockHead = read_block_head(read_header(model.path))
        super().__init__(
            model, beside, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, abort=abort
        )
        self._row_width = self.width
        self.width *= len(self.head.layers)
        self.set_causal(self.head.causal)
        if self.head.candidates:
            nextn.keep_states(self)

    def sequence_batch(self, features: FloatArray, start: int) -> FeatureBatch:
        """The rows that read features of a sequence from position `start` on.

        Args:
            features: (tokens, width).
        """
        return FeatureBatch.of_sequence(features, start, in_parts=self.model.has_position_parts)

    def block_batch(self, root: int, start: int) -> TokenBatch:
        """The rows of a block behind a sequence.

        Args:
            root: the last token, whose features are not known yet.
            start: its position.
        """
        tokens = [root] + [self.head.mask_token] * (self.head.block_size - 1)
        return TokenBatch.run(tokens, start, 1, "all")

    def pairs(self, blocks: int) -> tuple[FloatArray, FloatArray]:
        """The candidates of positions of the last blocks, and how well each follows those before it.

        For DFlash2. The first position of a block has none, and the candidates of the next one follow the
        root, so all rows of its scores are alike.

        Args:
            blocks: that were decoded together.

        Returns:
            Tokens (blocks, positions - 1, candidates), and scores (blocks, positions - 1, candidates,
            candidates): of each candidate of the position before, those of this position's.
        """
        count, size = self.head.candidates, self.head.block_size
        rows = (
            nextn.kept_rows(self, blocks * size, self._row_width, "features")
            .copy()
            .reshape(blocks, size, -1)[:, 1:]
        )
        scores = rows[:, :, count : count + count * count].reshape(blocks, size - 1, count, count)
        return rows[:, :, :count], scores

    def draft_from_zeros(self, known: int) -> None:
        """Draft a block as if all that the head reads of its target were zero; see HeadContext."""
        self.decode(self.sequence_batch(np.zeros((known, self.width), dtype=np.float32), 0))
        self.decode(self.block_batch(0, known))
        self.logits()
        if self.head.candidates:
            self.pairs(1)


@dataclass(frozen=True)
class FeatureBatch(EncoderBatch):
    """Rows without tokens that enter a sequence's cache, and give no logits."""

    # whether positions have four parts (M-RoPE), of which sequences use the first three
    in_parts: bool = False

    @classmethod
    def of_sequence(cls, features: FloatArray, start: int, *, in_parts: bool) -> FeatureBatch:
        """Features at consecutive positions of sequence 0."""
        n = len(features)
        return cls(
            tokens=np.empty(0, dtype=np.int32),
            positions=np.arange(start, start + n, dtype=np.int32),
            sequence_ids=np.zeros(n, dtype=np.int32),
            offsets=np.arange(n + 1, dtype=np.int64),
            wants_logits=np.zeros(n, dtype=np.bool_),
            features=features,
            in_parts=in_parts,
        )

    def to_llama(self) -> tuple[Any, tuple[object, ...]]:
        """The C struct, and the arrays it points into, which must outlive it."""
        if not self.in_parts:
            return super().to_llama()
        sequence = self.positions
        positions = np.concatenate([sequence, sequence, sequence, np.zeros_like(sequence)])
        return EncoderBatch.to_llama(replace(self, positions=positions, in_parts=False))
