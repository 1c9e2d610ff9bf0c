"""Layers for multi-token prediction (MTP) inside a model's own file, and whether they can draft here.

Such a layer is trained with the model (DeepSeek-V3, arXiv 2412.19437, section 2.2): from a token and the
model's state at the token before it, it predicts the next token. So it is a draft head that comes with its
target.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.errors import UsageError
from edgespec.models.gguf.layers import ModelFiles, MTPLayers, mtp_count
from edgespec.option import named

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

MTP_NAME = "MTP layer"
"""The name of such a drafter, for people."""


def with_output(layers: ModelFiles, target: ModelFiles) -> ModelFiles:
    """The weights that a draft step multiplies by: those of layers or a head, and the target's output."""
    tensors = {tensor.name: tensor for header in target.headers for tensor in header.tensors}
    output = tensors.get("output.weight") or tensors.get("token_embd.weight")
    own = {tensor.name for header in layers.headers for tensor in header.tensors}
    if output is None or any(name.endswith("nextn.shared_head_head.weight") for name in own):
        return layers
    first, *others = layers.headers
    # Under this name it is multiplied by, whatever else it is used for.
    output = replace(output, name="output.weight")
    return ModelFiles((replace(first, tensors=(*first.tensors, output)), *others))


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
