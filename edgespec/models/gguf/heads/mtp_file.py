"""A model's layers for multi-token prediction (MTP) in a file of their own.

llama.cpp's converter writes such files with `--mtp`: they have the settings of the whole model, its
embeddings, last norm and output, and of its layers only those that predict further tokens. They are loaded
like a model, and drafted with like the layers in a target's own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.errors import ModelFileError, PairingError
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.heads.eagle import is_head
from edgespec.models.gguf.heads.mtp import graph_fault
from edgespec.models.gguf.layers import ModelFiles, MTPLayers, mtp_count, of_plain_layers
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader, as_count

_HINT = "Name the file of this model's MTP layer, or another drafter."


@dataclass(frozen=True)
class MTPFile(ModelFiles):
    """The files of layers for multi-token prediction, as a drafter.

    Its headers have all of the files' tensors, and the settings of so many layers with attention.

    Attributes:
        n_layers: how many there are.
        n_before: layers of the model that they follow.
    """

    n_layers: int = 1
    n_before: int = 0

    @property
    def width(self) -> int:
        """Elements of a feature, and of the model's states."""
        return _width(self.headers[0])


def reads_target(drafter: ModelFiles) -> bool:
    """True if a drafter reads its target's hidden states: a head, an assistant, or an MTP layer."""
    return isinstance(drafter, MTPLayers | MTPFile) or is_head(drafter.headers[0])


def is_mtp_file(header: GGUFHeader) -> bool:
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


def read_mtp_file(headers: Sequence[GGUFHeader]) -> MTPFile:
    """The layers in files for which `is_mtp_file` is true.

    Raises:
        ModelFileError: llama.cpp cannot compute so many layers of this architecture.
    """
    header, count = headers[0], mtp_count(headers[0])
    if fault := graph_fault(header.architecture, count):
        raise ModelFileError(f"{header.path.name} cannot draft: {fault}.", "Name another drafter.")
    return MTPFile(
        (of_plain_layers(header, count), *headers[1:]),
        n_layers=count,
        n_before=(header.block_count or 0) - count,
    )


def drafter_files(header: GGUFHeader) -> ModelFiles:
    """All files of a drafter, whatever kind it is, that `header` is the first or only file of.

    Raises:
        ModelFileError: a part is missing or damaged; or as `read_mtp_file`.
    """
    if not is_mtp_file(header):
        return ModelFiles.of(header)
    return read_mtp_file(
        [header if path == header.path else read_header(path) for path in split_paths(header)]
    )


def require_mtp_file_fits(layers: MTPFile, target: ModelFiles) -> None:
    """Make sure that layers were made for a model like this target.

    The vocabularies' tokens are compared when both are loaded.

    Raises:
        PairingError: they were not.
    """
    own, header = layers.headers[0], target.headers[0]
    made = f"The MTP layer in {own.path.name} was made for another target than {header.path.name}: "
    if own.architecture != header.architecture:
        raise PairingError(f"{made}its architecture is {own.architecture}, not {header.architecture}.", _HINT)
    if layers.width != (width := _width(header)):
        raise PairingError(f"{made}it reads states of {layers.width} elements, not {width}.", _HINT)
    n_layers = (header.block_count or 0) - mtp_count(header)
    if layers.n_before != n_layers:
        raise PairingError(f"{made}it follows {layers.n_before} layers, but there are {n_layers}.", _HINT)


def _width(header: GGUFHeader) -> int:
    return as_count(header.metadata.get(f"{header.architecture}.embedding_length")) or 0
