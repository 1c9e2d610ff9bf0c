"""Leaves layers out of a model in place, without making a new file.

A layer adds the outputs of its attention and feed-forward blocks to its input. With the weights of
those two outputs set to zero it adds nothing, as if it were not there. llama.cpp maps the file, so changes to
the file change the running model too, and a layer can be switched off and on within milliseconds.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from edgespec.errors import BackendError
from edgespec.models.gguf.header import read_header

# The output weights of a layer's blocks, as llama.cpp names them in most architectures.
_OUTPUTS = re.compile(
    r"blk\.(\d+)\.(attn_output|ffn_down|ffn_down_exps|ffn_down_shexp|ssm_out)\.(weight|bias)"
)
_CHUNK = 8 << 20


class MaskedCopy:
    """A copy of a GGUF file whose layers can be masked; removed when it is closed.

    In every ggml type, a block of zero bytes means zeros, so no type needs special treatment.

    Raises:
        BackendError: the layers of this architecture cannot be masked.
    """

    def __init__(self, source: Path, copy: Path) -> None:
        self.path = copy
        self._source = source
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._masked: frozenset[int] = frozenset()
        header = read_header(source)
        parts: dict[int, set[str]] = {}
        for tensor in header.tensors:
            match = _OUTPUTS.fullmatch(tensor.name)
            if match:
                self._spans.setdefault(int(match[1]), []).append((tensor.offset, tensor.n_bytes))
                parts.setdefault(int(match[1]), set()).add(match[2].split("_")[0])
        self.n_layers = header.block_count or 0
        if any(
            parts.get(layer, set()) not in ({"attn", "ffn"}, {"ssm", "ffn"}) for layer in range(self.n_layers)
        ):
            raise BackendError(
                f"The layers of {source.name} ({header.architecture}) cannot be left out individually.",
                "Requantize only: edgespec draft make TARGET --keep-layers.",
            )
        shutil.copyfile(source, copy)

    def mask(self, layers: Collection[int]) -> None:
        """Mask these layers, and restore all others."""
        wanted = frozenset(layers)
        with self.path.open("r+b") as copy, self._source.open("rb") as source:
            for layer in wanted - self._masked:
                for offset, n_bytes in self._spans[layer]:
                    copy.seek(offset)
                    _write_zeros(copy, n_bytes)
            for layer in self._masked - wanted:
                for offset, n_bytes in self._spans[layer]:
                    copy.seek(offset)
                    source.seek(offset)
                    left = n_bytes
                    while left:
                        chunk = source.read(min(left, _CHUNK))
                        copy.write(chunk)
                        left -= len(chunk)
            copy.flush()
            os.fsync(copy.fileno())  # also for file systems whose mappings do not see writes at once
        self._masked = wanted

    def close(self) -> None:
        """Remove the copy."""
        self.path.unlink(missing_ok=True)


def _write_zeros(file: object, n_bytes: int) -> None:
    zeros = bytes(min(n_bytes, _CHUNK))
    while n_bytes:
        piece = zeros[: min(n_bytes, _CHUNK)]
        file.write(piece)  # type: ignore[attr-defined]
        n_bytes -= len(piece)
