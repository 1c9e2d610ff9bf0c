"""Draft heads: what the header of an EAGLE-3 head says, and whether the head fits a target.

A head (EAGLE-3, Li et al. 2025, arXiv 2503.01840) is a single layer that reads the target's own hidden
states instead of the text alone. It is trained for one target and of no use to any other. llama.cpp aborts
over heads that do not fit, so what it would assert is checked here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, PairingError
from edgespec.models.gguf.header_checks import D2T
from edgespec.models.gguf.heads.assistant import is_assistant
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader, TensorInfo, as_count

ARCHITECTURE = "eagle3"
BLOCK_ARCHITECTURE = "dflash"  # heads that draft a block of tokens at once; see block_heads
_I64 = 27
_NEWER = "Get another conversion of the head."


@dataclass(frozen=True)
class DraftHead:
    """The header of a draft head.

    Attributes:
        layers: of the target, whose inputs the head reads. The first layer is 0, so each is also the number
            of layers that came before.
        target_width: elements of the target's hidden states.
        width: elements of the head's own, which are its features.
        n_drafted: tokens that it can draft.
        borrows_embedding, borrows_output: whether it uses the target's token embedding, its output matrix.
    """

    header: GGUFHeader
    layers: tuple[int, ...]
    target_width: int
    width: int
    n_drafted: int
    borrows_embedding: bool
    borrows_output: bool

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.header.path.name


def is_head(header: GGUFHeader) -> bool:
    """True if a file is a draft head, which is of no use without its target."""
    return header.architecture in (ARCHITECTURE, BLOCK_ARCHITECTURE) or is_assistant(header)


def read_head(header: GGUFHeader) -> DraftHead:
    """Read the header of an EAGLE-3 head.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
    """
    layers = header.metadata.get(f"{ARCHITECTURE}.target_layers")
    if not isinstance(layers, ArrayInfo) or not layers.values:
        damaged(header, "it does not name the layers of its target that it reads")
    target_width = count_of(header, "target_hidden_size")
    width = count_of(header, "embedding_length")
    if count_of(header, "block_count") != 1:
        damaged(header, "it has more than one layer")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    require_shape(header, tensors, "fc.weight", (len(layers.values) * target_width, width))
    own_output, table = tensors.get("output.weight"), tensors.get(D2T)
    n_drafted = drafted_range(header, table, own_output)
    if own_output is not None:
        require_shape(header, tensors, "output.weight", (width, n_drafted))
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        require_shape(header, tensors, "token_embd.weight", (width, header.n_vocab))
    return DraftHead(
        header, layers.values, target_width, width, n_drafted, embedding is None, own_output is None
    )


def require_fit(head: DraftHead, target: ModelFiles) -> None:
    """Make sure that a head was made for a model like this target.

    The vocabularies' tokens are compared when both are loaded.

    Raises:
        PairingError: it was not.
        ModelFileError: the head's table of drafted tokens is damaged.
    """
    header = target.headers[0]
    large = header.path.name
    width, layers = _of_target(header, "embedding_length"), _of_target(header, "block_count")
    made = f"The head {head.name} was made for another target than {large}: "
    hint = "Name a head that was trained for this model, or an ordinary drafter."
    if head.target_width != width:
        raise PairingError(
            f"{made}it reads hidden states of {head.target_width} elements, not {width}.", hint
        )
    if min(head.layers) < 1 or max(head.layers) >= layers:
        wanted = ", ".join(map(str, head.layers))
        raise PairingError(
            f"{made}it reads the layers {wanted} (the first is 0), but there are {layers}.", hint
        )
    if header.n_vocab > head.header.n_vocab:
        raise PairingError(
            f"{made}it knows {head.header.n_vocab} tokens, but the target has {header.n_vocab}.", hint
        )
    borrows = head.borrows_embedding or head.borrows_output
    if borrows and head.width != width:
        raise PairingError(
            f"{made}it has no matrix for its {head.width} elements and borrows those of {width}.",
            hint,
        )
    tensors = {tensor.name: tensor for part in target.headers for tensor in part.tensors}
    embedding = tensors.get("token_embd.weight")
    output = tensors.get("output.weight", embedding)
    rows = [matrix.shape[1] for matrix in (embedding, output) if matrix is not None]
    if borrows and (len(rows) < 2 or (head.borrows_output and rows[1] != head.n_drafted)):
        raise PairingError(f"{made}it borrows matrices that the target stores differently.", hint)
    _check_table(head)


def drafted_tokens(head: DraftHead) -> NDArray[np.int64]:
    """(n_drafted,) the target's id of each token that the head drafts, in the order of its logits."""
    table = next((tensor for tensor in head.header.tensors if tensor.name == D2T), None)
    if table is None:
        return np.arange(head.n_drafted, dtype=np.int64)
    path: Path = head.header.path
    return np.fromfile(path, dtype="<i8", count=table.shape[0], offset=table.offset)


def _check_table(head: DraftHead) -> None:
    """Refuse a table that names tokens twice, or some that do not exist: llama.cpp would write there."""
    ids = drafted_tokens(head)
    if ids.min() < 0 or ids.max() >= head.header.n_vocab or len(np.unique(ids)) < len(ids):
        damaged(
            head.header,
            "its table of drafted tokens (d2t) does not hold distinct token ids; in some files it holds "
            "offsets, which llama.cpp does not read",
        )


def drafted_range(header: GGUFHeader, table: TensorInfo | None, output: TensorInfo | None) -> int:
    """Number of tokens that a head drafts.

    Args:
        table: of their ids; None if it drafts all tokens.
        output: its own output matrix; None if it borrows the target's.

    Raises:
        ModelFileError: the table is invalid.
    """
    n_drafted = table.shape[0] if table is not None else header.n_vocab
    if table is not None and (table.type_id != _I64 or output is None or n_drafted > header.n_vocab):
        damaged(header, "its table of drafted tokens (d2t) is invalid")
    return n_drafted


def require_shape(
    header: GGUFHeader, tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, int]
) -> None:
    """Make sure that a head has a tensor of a shape.

    Raises:
        ModelFileError: it has another one, or none of this name.
    """
    if name not in tensors:
        damaged(header, f"it has no tensor {name}")
    if (found := tensors[name].shape) != shape:
        damaged(header, f"its tensor {name} has the shape {list(found)} instead of {list(shape)}")


def count_of(header: GGUFHeader, key: str) -> int:
    """A positive number in a head's metadata.

    Raises:
        ModelFileError: it is not there.
    """
    value = as_count(header.metadata.get(f"{header.architecture}.{key}"))
    if not value:
        damaged(header, f"it lacks its {key.replace('_', ' ')}")
    return value


def _of_target(header: GGUFHeader, key: str) -> int:
    value: Any = header.metadata.get(f"{header.architecture}.{key}")
    return as_count(value) or 0


def damaged(header: GGUFHeader, what: str) -> NoReturn:
    """Refuse a head.

    Raises:
        ModelFileError: always.
    """
    raise ModelFileError(f"The head {header.path} cannot be used: {what}.", _NEWER)
