"""The Markov head of a DSpark file: what each token adds to the logits of the token after it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.heads.block.block_head import BlockHead
from edgespec.heads.shared.layer_head import drafted_tokens
from edgespec.models.gguf.types import TensorInfo

Rows = NDArray[np.float32]
Ids = NDArray[np.int32]


class MarkovHead:
    """The two matrices of a Markov head, of which rows are read from the file when they are asked for.

    Raises:
        ModelFileError: the file cannot be read, or a matrix is stored in a type that has no numbers here.
    """

    def __init__(self, head: BlockHead) -> None:
        tensors = {tensor.name: tensor for tensor in head.header.tensors}
        self._path = head.header.path
        self._matrices = [_Matrix(head, tensors[f"markov_w{number}.weight"]) for number in (1, 2)]
        ids = drafted_tokens(head)
        self._rows = np.full(head.header.n_vocab, -1, dtype=np.int32)
        self._rows[ids] = np.arange(len(ids), dtype=np.int32)
        try:
            self._file: Any = self._path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable() from error

    def before(self, tokens: Ids) -> Rows:
        """(tokens, rank) the rows of tokens in the matrix for those that come before.

        Raises:
            ModelFileError: the file cannot be read any more.
        """
        return self._read(self._matrices[0], tokens)

    def after(self, tokens: Ids) -> Rows:
        """(tokens, rank) the rows of tokens in the matrix for those that follow; 0 for those not drafted.

        The bias of a token is the product with the row of the token before.

        Raises:
            ModelFileError: the file cannot be read any more.
        """
        places = self._rows[tokens]
        drafted = places >= 0
        found = np.zeros((len(tokens), self._matrices[1].tensor.shape[0]), dtype=np.float32)
        found[drafted] = self._read(self._matrices[1], places[drafted])
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, matrix: _Matrix, numbers: Ids) -> Rows:
        """(numbers, rank) rows of a matrix."""
        data = np.empty((len(numbers), matrix.row_bytes), dtype=np.uint8)
        for row, number in zip(data, numbers.tolist(), strict=True):
            try:
                self._file.seek(matrix.tensor.offset + number * matrix.row_bytes)
                n_bytes = self._file.readinto(row)
            except OSError as error:
                raise self._unreadable() from error
            if n_bytes != matrix.row_bytes:
                raise self._unreadable()
        return matrix.numbers(data)

    def _unreadable(self) -> ModelFileError:
        return ModelFileError(f"{self._path} can no longer be read.", "Check that the file is still there.")


class _Matrix:
    def __init__(self, head: BlockHead, tensor: TensorInfo) -> None:
        import gguf

        self.tensor = tensor
        self.row_bytes = tensor.n_bytes // tensor.shape[1]
        self._dequantize = gguf.dequantize
        try:
            self._type = gguf.GGMLQuantizationType(tensor.type_id)
            self.numbers(np.zeros((1, self.row_bytes), dtype=np.uint8))
        except (ValueError, NotImplementedError) as error:
            raise ModelFileError(
                f"The matrix {tensor.name} of {head.header.path} has a type that cannot be read here.",
                "Get another conversion of the head.",
            ) from error

    def numbers(self, data: NDArray[np.uint8]) -> Rows:
        """(rows, rank) of the bytes of rows (rows, row_bytes)."""
        if self._type.name in ("F32", "F16"):
            data = data.view(np.float32 if self._type.name == "F32" else np.float16)
        found: Rows = self._dequantize(data, self._type).astype(np.float32)
        return found.reshape(len(data), -1)
