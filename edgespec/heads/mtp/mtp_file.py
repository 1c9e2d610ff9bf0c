"""A model's layers for multi-token prediction (MTP) in a file of their own.

llama.cpp's converter writes such files with `--mtp`: they have the settings of the whole model, its
embeddings, last norm and output, and of its layers only those that predict further tokens. They are loaded
like a model, and drafted with like the layers in a target's own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.errors import ModelFileError
from edgespec.models.gguf.layers import ModelFiles, mtp_count, of_plain_layers
from edgespec.models.gguf.types import GGUFHeader

ARCHITECTURES = frozenset(
    {
        "bailingmoe3",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "glm4moe",
        "glm-dsa",
        "hy_v3",
        "mimo2",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "step35",
    }
)
"""Those for which llama.cpp has a graph of the layer alone, with features as wide as the model's states."""

SEVERAL = frozenset({"hy_v3", "mimo2", "step35"})
"""Those whose graph computes any of several layers; it computes the first one if it is not told otherwise.

The graphs of all others assert that there is one layer.
"""


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


def read_mtp_file(headers: Sequence[GGUFHeader]) -> MTPFile:
    """The layers in files of the family `HeadFamily.MTP`.

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


def graph_fault(architecture: str, n_layers: int) -> str:
    """The reason that llama.cpp cannot compute so many layers, as a clause; empty if it can."""
    if architecture not in ARCHITECTURES:
        return f"llama.cpp cannot compute MTP layers of the architecture {architecture}"
    if n_layers > 1 and architecture not in SEVERAL:
        return (
            f"it has {n_layers} MTP layers, and llama.cpp computes one of the architecture {architecture} "
            "only if there are no others"
        )
    return ""
