"""The rows of one llama.cpp decode call, as flat arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.files.state import FileState
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml.tensors import dequantized
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import parts_by_name
from edgespec.models.gguf.types import GGUFHeader, TensorInfo
from edgespec.speculation.tree import TokenTree

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class StateBranches:
    """The branches of one sequence's rows, where layers keep a running state."""

    parents: IntArray  # (rows,) of each row, an earlier one; -1 for the first row, and for rows of padding
    certain: int  # leading rows, each the parent of the next one, after which the state is kept
    first_cell: int  # that of the first row


@dataclass(frozen=True)
class TokenBatch:
    """Tokens to decode together.

    A row may belong to several sequences. It attends to the cells of its first sequence, at positions up to
    its own.
    """

    tokens: IntArray  # (rows,) token ids
    positions: IntArray  # (rows,) positions in the text, the first token at 0
    sequence_ids: IntArray  # flat; row i belongs to sequence_ids[offsets[i]:offsets[i + 1]]
    offsets: NDArray[np.int64]  # (rows + 1,)
    wants_logits: NDArray[np.bool_]  # (rows,) bool
    padding: int = 0  # rows at the end whose results are not used
    # (rows, width) what a draft head reads beside each token; None for models. Rows of padding have none.
    features: NDArray[np.float32] | None = None
    # of a sequence whose running state branches; None if each row follows the one before it
    branches: StateBranches | None = None
    # whether rows of padding that are added want logits if any other row does
    padding_wants_logits: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def run(
        cls, tokens: Sequence[int] | IntArray, start: int, n_sequences: int, logits: str = "none"
    ) -> TokenBatch:
        """Consecutive tokens from position `start`, in sequences 0 .. n_sequences - 1.

        `logits` names the rows that want them: "none", "last" or "all".
        """
        n = len(tokens)
        wants = np.full(n, logits == "all", dtype=np.bool_)
        if logits == "last":
            wants[-1] = True
        return cls(
            tokens=np.asarray(tokens, dtype=np.int32),
            positions=np.arange(start, start + n, dtype=np.int32),
            sequence_ids=np.tile(np.arange(n_sequences, dtype=np.int32), n),
            offsets=np.arange(n + 1, dtype=np.int64) * n_sequences,
            wants_logits=wants,
        )

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The rows of several batches without padding, in the given order."""
        if len(batches) == 1:
            return batches[0]
        ends = np.cumsum([len(batch.sequence_ids) for batch in batches])
        starts = [0, *ends[:-1].tolist()]
        return cls(
            tokens=np.concatenate([batch.tokens for batch in batches]),
            positions=np.concatenate([batch.positions for batch in batches]),
            sequence_ids=np.concatenate([batch.sequence_ids for batch in batches]),
            offsets=np.concatenate(
                [batch.offsets[:-1] + start for batch, start in zip(batches, starts, strict=True)]
                + [ends[-1:]]
            ),
            wants_logits=np.concatenate([batch.wants_logits for batch in batches]),
            features=_joined_features(batches),
        )

    def part(self, start: int, end: int) -> TokenBatch:
        """Return rows start .. end - 1 of a batch whose rows belong to one sequence each."""
        rows = slice(start, end)
        tokens = self.tokens[rows]
        return TokenBatch(
            tokens=tokens,
            positions=self.positions[rows],
            sequence_ids=self.sequence_ids[rows],
            offsets=np.arange(len(tokens) + 1, dtype=np.int64),
            wants_logits=self.wants_logits[rows],
        )

    def with_sequences(self, sequence_ids: IntArray) -> TokenBatch:
        """Return a batch of these rows in other sequences."""
        return replace(self, sequence_ids=sequence_ids)

    def padded(self, rows: int, sequence_id: int) -> TokenBatch:
        """Return the batch with unused rows appended, in a sequence of their own.

        They want logits if any other row does: llama.cpp computes the end of the last layer and the logits
            for such rows only, and their number must not change the choice of kernels there either. Where
            `padding_wants_logits` is False, enough other rows want them.
        """
        extra = rows - len(self)
        if extra <= 0:
            return self
        return TokenBatch(
            tokens=np.concatenate([self.tokens, np.repeat(self.tokens[:1], extra)]),
            positions=np.concatenate([self.positions, np.arange(extra, dtype=np.int32)]),
            sequence_ids=np.concatenate([self.sequence_ids, np.full(extra, sequence_id, dtype=np.int32)]),
            offsets=np.concatenate([self.offsets, self.offsets[-1] + np.arange(1, extra + 1)]),
            wants_logits=np.concatenate([self.wants_logits, np.full(extra, self.pads_logits)]),
            padding=self.padding + extra,
        )

    @property
    def pads_logits(self) -> bool:
        """True if rows of padding want logits."""
        return self.padding_wants_logits and bool(self.wants_logits.any())

    @property
    def n_outputs(self) -> int:
        """Rows whose logits are used; they come before those of the padding."""
        return int(np.count_nonzero(self.wants_logits[: len(self) - self.padding]))

    def to_llama(self) -> tuple[llama_cpp.llama_batch, tuple[object, ...]]:
        """The C struct, and the arrays it points into, which must outlive it."""
        tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        features = None if self.features is None else np.ascontiguousarray(self.features, dtype=np.float32)
        positions = np.ascontiguousarray(self.positions, dtype=np.int32)
        ids = np.ascontiguousarray(self.sequence_ids, dtype=np.int32)
        counts = np.diff(self.offsets).astype(np.int32)
        # One pointer per row into the flat ids, by address arithmetic instead of a loop.
        pointers = (ids.ctypes.data + self.offsets[:-1] * ids.itemsize).astype(np.uintp)
        wants = np.ascontiguousarray(self.wants_logits, dtype=np.int8)
        raw = _RawBatch(
            len(self),
            tokens.ctypes.data if len(tokens) else None,
            None if features is None else features.ctypes.data,
            positions.ctypes.data,
            counts.ctypes.data,
            pointers.ctypes.data,
            wants.ctypes.data,
        )
        batch = llama_cpp.llama_batch.from_buffer(raw)
        kept = (tokens, positions, ids, counts, pointers, wants)
        return batch, kept if features is None else (*kept, features)


@dataclass(frozen=True)
class EmbeddedBatch(TokenBatch):
    """Rows without tokens: embeddings stand in their place."""

    @classmethod
    def of_rows(cls, rows: NDArray[np.float32], positions: IntArray, n_sequences: int) -> EmbeddedBatch:
        """Embeddings in sequences 0 .. n_sequences - 1.

        Args:
            positions: (rows,), or (4 x rows,) for models with M-RoPE: in time, height and width, and zeros.
        """
        n = len(rows)
        return cls(
            tokens=np.empty(0, dtype=np.int32),
            positions=positions,
            sequence_ids=np.tile(np.arange(n_sequences, dtype=np.int32), n),
            offsets=np.arange(n + 1, dtype=np.int64) * n_sequences,
            wants_logits=np.zeros(n, dtype=np.bool_),
            features=rows,
        )

    def __len__(self) -> int:
        return len(self.wants_logits)


@dataclass(frozen=True)
class EncoderBatch(EmbeddedBatch):
    """Rows without tokens, for an encoder that reads features alone."""

    @classmethod
    def of(cls, features: NDArray[np.float32], sequence: int) -> EncoderBatch:
        """Features at consecutive positions of a sequence, all of which are wanted."""
        n = len(features)
        return cls(
            tokens=np.empty(0, dtype=np.int32),
            positions=np.arange(n, dtype=np.int32),
            sequence_ids=np.full(n, sequence, dtype=np.int32),
            offsets=np.arange(n + 1, dtype=np.int64),
            wants_logits=np.ones(n, dtype=np.bool_),
            features=features,
        )


def _joined_features(batches: Sequence[TokenBatch]) -> NDArray[np.float32] | None:
    """The features of several batches; all of them have some, or none has."""
    found = [batch.features for batch in batches if batch.features is not None]
    return np.concatenate(found) if found else None


class _RawBatch(ctypes.Structure):
    """llama_batch with plain addresses; creating typed pointers can take longer than a small decode."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


assert ctypes.sizeof(_RawBatch) == ctypes.sizeof(llama_cpp.llama_batch)


def tree_batch(tree: TokenTree, start: int) -> TokenBatch:
    """The rows that decode a tree with its root at position `start`, with logits for every node."""
    numbers, offsets = tree.sequences
    return TokenBatch(
        tokens=tree.tokens,
        positions=tree.depths + start,
        sequence_ids=numbers,
        offsets=offsets,
        wants_logits=np.ones(len(tree), dtype=np.bool_),
    )


_TABLE = "token_embd.weight"
# Architectures whose graphs use nothing else of a token. Gemma scales embeddings of tokens and not those of
# images, and others look further rows up.
_NOTHING_ELSE = {"internlm2", "llama", "mistral3", "phi3", "qwen2", "qwen2vl", "qwen3", "qwen3moe"} | {
    "qwen3vl",
    "qwen3vlmoe",
}


class TokenRows:
    """Looks up embeddings of tokens.

    Args:
        header: of the file with the table.
        table: its tensor.
        state: of that file when the model was loaded.
        width: elements of a row of a pass; those beyond an embedding are zero.
    """

    def __init__(self, header: GGUFHeader, table: TensorInfo, state: FileState, width: int) -> None:
        self._path = header.path
        self._state = state
        self._start = table.offset
        self._type = table.type_id
        self._row_bytes = table.n_bytes // table.shape[1]
        self._width = width

    @classmethod
    def of(cls, model: Model) -> TokenRows | None:
        """The table of a model; None if its graph uses more of a token than a row of it."""
        first, *others = parts_by_name(model.path)
        header = read_header(first)
        if header.architecture not in _NOTHING_ELSE:
            return None
        for part, state in zip((header, *map(read_header, others)), model.states, strict=True):
            for tensor in part.tensors:
                if tensor.name == _TABLE:
                    return cls(part, tensor, state, model.input_width)
        return None

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """(tokens, width) their embeddings.

        Raises:
            ModelFileError: the file was changed, or cannot be read any more.
        """
        data = np.empty((len(tokens), self._row_bytes), dtype=np.uint8)
        try:
            with self._path.open("rb") as file:
                if FileState.of(file.fileno()) != self._state:
                    raise OSError
                for row, token in zip(data, tokens, strict=True):
                    file.seek(self._start + token * self._row_bytes)
                    if file.readinto(row.data) != self._row_bytes:
                        raise OSError
        except OSError as error:
            raise ModelFileError(
                f"'{self._path}' was changed, moved or removed while the model was in use.",
                "Embeddings of tokens are read from that file; load the model again.",
            ) from error
        rows = dequantized(self._type, data)
        return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1])))
