"""The embeddings of tokens, as a model's graph looks them up: rows of a table in its file.

A pass has either tokens or embeddings. With rows in place of tokens, text is read together with images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.kernels.ggml.tensors import dequantized
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import parts_by_name
from edgespec.models.gguf.types import GGUFHeader, TensorInfo

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
        width: elements of a row of a pass; those beyond an embedding are zero.
    """

    def __init__(self, header: GGUFHeader, table: TensorInfo, width: int) -> None:
        self._path = header.path
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
        for part in (header, *map(read_header, others)):
            for tensor in part.tensors:
                if tensor.name == _TABLE:
                    return cls(part, tensor, model.input_width)
        return None

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """(tokens, width) their embeddings.

        Raises:
            ModelFileError: the file cannot be read any more.
        """
        data = np.empty((len(tokens), self._row_bytes), dtype=np.uint8)
        try:
            with self._path.open("rb") as file:
                for row, token in zip(data, tokens, strict=True):
                    file.seek(self._start + token * self._row_bytes)
                    if file.readinto(row.data) != self._row_bytes:
                        raise OSError
        except OSError as error:
            raise ModelFileError(
                f"{self._path} can no longer be read.", "Check that the file is still there."
            ) from error
        rows = dequantized(self._type, data)
        return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1])))
