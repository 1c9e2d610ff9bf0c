"""Leave layers out of a model without making a new file: silence them in place.

A layer adds what its attention and its feed-forward block put out to what came in. With the weights of
those two outputs at zero it adds nothing, as if it were not there. llama.cpp maps the file, so bytes that
change in the file change in the running model too, and a layer goes and comes back within milliseconds.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from edgespec.errors import BackendError
from edgespec.models.gguf.header import read_header

# What a layer's blocks put out, in all architectures that llama.cpp names so.
_OUTPUTS = re.compile(
    r"blk\.(\d+)\.(attn_output|ffn_down|ffn_down_exps|ffn_down_shexp|ssm_out)\.(weight|bias)"
)
_CHUNK = 8 << 20


class MaskedCopy:
    """A copy of a GGUF file whose layers can be silenced; removed when it is closed.

    Every type of ggml reads a block of zero bytes as zeros, so no type needs a rule of its own.

    Raises:
        BackendError: the model's layers are not built so that they can be silenced.
    """

    def __init__(self, source: Path, copy: Path) -> None:
        self.path = copy
        self._source = source
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._silent: frozenset[int] = frozenset()
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
                f"The layers of {source.name} ({header.architecture}) cannot be left out one by one.",
                "Requantize only: edgespec draft make TARGET --keep-layers.",
            )
        shutil.copyfile(source, copy)

    def silence(self, layers: Collection[int]) -> None:
        """Silence these layers, and bring all others back."""
        wanted = frozenset(layers)
        with self.path.open("r+b") as copy, self._source.open("rb") as source:
            for layer in wanted - self._silent:
                for offset, n_bytes in self._spans[layer]:
                    copy.seek(offset)
                    _write_zeros(copy, n_bytes)
            for layer in self._silent - wanted:
                for offset, n_bytes in self._spans[layer]:
                    copy.seek(offset)
                    source.seek(offset)
                    left = n_bytes
                    while left:
                        chunk = source.read(min(left, _CHUNK))
                        copy.write(chunk)
                        left -= len(chunk)
            copy.flush()
            os.fsync(copy.fileno())  # also through file systems that keep mappings apart from writes
        self._silent = wanted

    def close(self) -> None:
        """Remove the copy."""
        self.path.unlink(missing_ok=True)


def _write_zeros(file: object, n_bytes: int) -> None:
    zeros = bytes(min(n_bytes, _CHUNK))
    while n_bytes:
        piece = zeros[: min(n_bytes, _CHUNK)]
        file.write(piece)  # type: ignore[attr-defined]
        n_bytes -= len(piece)
