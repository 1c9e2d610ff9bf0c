"""Layers for multi-token prediction (MTP) as heads, and whether they can draft here.

Such a layer is trained with the model (DeepSeek-V3, arXiv 2412.19437, section 2.2): from a token and the
model's state at the token before it, it predicts the next token. So it is a draft head that comes with its
target, in the target's own file (`MTPLayers`) or in a file of its own (`MTPFile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.base.option import named
from edgespec.errors import ModelFileError, UsageError
from edgespec.heads.head import Head, another_target, with_output
from edgespec.models.gguf.head_family import HeadFamily
from edgespec.models.gguf.layers import ModelFiles, MTPLayers, mtp_count, of_plain_layers
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
    """

    n_layers: int = 1  # how many there are
    n_before: int = 0  # layers of the model that they follow


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


MTP_NAME = HeadFamily.MTP.value
"""The name of such a drafter, for people."""

_HINT = "Name the file of this model's MTP layer, or another drafter."
_OWN_OUTPUT = "nextn.shared_head_head.weight"


@dataclass(frozen=True)
class MTPHead(Head):
    """The layers of a target that predict further tokens."""

    role = MTP_NAME
    beside_target = False

    files: MTPLayers | MTPFile

    @property
    def shown_width(self) -> int:
        """Elements of the target's last state."""
        return self.files.headers[0].embedding_length or 0

    def require_fit(self, target: ModelFiles) -> None:
        """Make sure that the layers were made for a model like this target; see Head."""
        if isinstance(self.files, MTPFile) and (why := _misfit(self.files, target)):
            path = self.files.paths[0]
            raise another_target(f"The MTP layer in {path.name}", target.headers[0], why, _HINT)

    def multiplied(self, files: ModelFiles, target: ModelFiles) -> ModelFiles:
        """The weights that a draft step multiplies by; see Head."""
        own = {tensor.name for header in files.headers for tensor in header.tensors}
        if isinstance(files, MTPFile) or any(name.endswith(_OWN_OUTPUT) for name in own):
            return files
        return with_output(files, target)


def _misfit(layers: MTPFile, target: ModelFiles) -> str:
    """The reason why layers were not made for a model like this target; empty if they were."""
    own, header = layers.headers[0], target.headers[0]
    if own.architecture != header.architecture:
        return f"its architecture is {own.architecture}, not {header.architecture}"
    widths = [each.embedding_length or 0 for each in (own, header)]
    if widths[0] != widths[1]:
        return f"it reads states of {widths[0]} elements, not {widths[1]}"
    n_layers = (header.block_count or 0) - mtp_count(header)
    if layers.n_before != n_layers:
        return f"it follows {layers.n_before} layers, but there are {n_layers}"
    return ""


def require_mtp(files: ModelFiles) -> MTPLayers:
    """The layers of a model that draft for it.

    Raises:
        UsageError: it has none, or this llama.cpp cannot compute them.
    """
    if fault := mtp_fault(files):
        raise UsageError(
            f"{files.paths[0].name} cannot draft for itself: {fault}.",
            f"Leave out {named('draft', 'mtp')}, or name a drafter.",
        )
    assert files.mtp is not None
    return files.mtp


def mtp_fault(files: ModelFiles) -> str:
    """The reason that a model's layers cannot draft for it, as a clause; empty if they can."""
    header = files.headers[0]
    if files.mtp is None:
        if mtp_count(header):
            return "its header declares an MTP layer, but the file lacks the layer's weights"
        return "it has no layer for multi-token prediction (MTP)"
    return graph_fault(header.architecture, files.mtp.n_layers)
