"""The shape of a network of the llama family, read from its GGUF metadata.

The arithmetic follows llama.cpp's graphs of these architectures (src/models/llama.cpp, qwen2.cpp, qwen3.cpp,
gemma3.cpp). A model with anything else in it is refused: a drafter that is tuned by other arithmetic than it
runs with would get worse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.base.units import readable
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.models.gguf.types import GGUFHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say llama

_GEMMA3_LOCAL_BASE = 10000.0  # rope base of layers with a sliding window
_GEMMA3_PERIOD = 6  # every sixth layer sees the whole text
_GEMMA3_27B_LAYERS = 62  # the one size whose attention is scaled by width over heads
_LAYER_PARTS = frozenset(
    f"{name}.{kind}"
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for kind in ("weight", "bias")
) | {
    f"{name}.weight"
    for name in (
        *("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"),
        *("post_attention_norm", "post_ffw_norm"),
    )
}
_WHOLE_PARTS = frozenset({"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"})


@dataclass(frozen=True)
class NetworkShape:
    """Sizes and constants of a network.

    Attributes:
        heads, kv_heads: attention heads of queries, and of keys and values.
        head: elements of a head; `rotated` of them turn with the position.
        neighbours: whether rotation pairs elements i and i + 1; otherwise i and i + rotated / 2.
        rope_scale: positions are multiplied by this.
        local_base: the rope base in layers with a window; None if no layer has one.
        window: tokens that such layers see; `period`: every so many layers, the last one has no window.
        embedding_scale: embeddings are multiplied by this.
        attention_scale: products of queries and keys are multiplied by this.
        gelu: whether the feed-forward blocks use GELU (its tanh approximation) instead of SiLU.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    rotated: int
    neighbours: bool
    epsilon: float
    base: float
    rope_scale: float
    local_base: float | None
    window: int
    period: int
    embedding_scale: float
    attention_scale: float
    gelu: bool

    def is_local(self, layer: int) -> bool:
        """True if this layer sees a window of the text only."""
        return self.local_base is not None and layer % self.period < self.period - 1


def shape_of(metadata: Mapping[str, Any], tensors: Collection[str], name: str) -> NetworkShape:
    """The shape of a model.

    Args:
        metadata: scalars and strings; arrays as anything else.
        tensors: names of all its tensors.
        name: of the file, for messages.
    """
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in ARCHITECTURES:
        raise _refused(name, f"its architecture is {architecture!r}")
    values = _ArchitectureSettings(metadata, architecture, name)
    unknown = sorted(tensor for tensor in tensors if not _is_known(tensor))
    if unknown:
        raise _refused(name, f"it has the tensor {unknown[0]!r}")
    if str(values.get("rope.scaling.type", "none")) not in ("none", "linear"):
        raise _refused(name, f"its positions are scaled by {values.get('rope.scaling.type', '')}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "expert_count"):
        if values.get(key, 0) or values.get(f"attention.{key}", 0):
            raise _refused(name, f"it has a setting {key}")
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    head = values.count("attention.key_length", width // heads)
    if values.count("attention.value_length", head) != head:
        raise _refused(name, "its keys and values have different lengths")
    gemma = architecture == "gemma3"
    layers = values.count("block_count")
    scaling = float(values.get("rope.scaling.factor", 0.0) or values.get("rope.scale_linear", 0.0) or 1.0)
    scaled_width = width // heads if gemma and layers == _GEMMA3_27B_LAYERS else head
    return NetworkShape(
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=values.count("attention.head_count_kv", heads),
        head=head,
        rotated=values.count("rope.dimension_count", head),
        neighbours=architecture == "llama",
        epsilon=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
        base=float(values.get("rope.freq_base", 10000.0)),
        rope_scale=1.0 / scaling,
        local_base=float(values.get("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)) if gemma else None,
        window=values.count("attention.sliding_window") if gemma else 0,
        period=values.count("attention.sliding_window_pattern", _GEMMA3_PERIOD) if gemma else 1,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        attention_scale=float(values.get("attention.scale", 0.0)) or 1.0 / math.sqrt(scaled_width),
        gelu=gemma,
    )


class _ArchitectureSettings:
    def __init__(self, metadata: Mapping[str, Any], architecture: str, name: str) -> None:
        self._metadata = metadata
        self._prefix = architecture
        self._name = name

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise _refused(self._name, f"its {key} differs between layers")
        return value


def _is_known(tensor: str) -> bool:
    if tensor in _WHOLE_PARTS:
        return True
    kind, _, rest = tensor.partition(".")
    number, _, part = rest.partition(".")
    return kind == "blk" and number.isdigit() and part in _LAYER_PARTS


def _refused(name: str, why: str) -> BackendError:
    return BackendError(
        f"{name} cannot be tuned: {why}.",
        f"Dense models of these architectures can: {', '.join(ARCHITECTURES)} (Mistral's are llama).",
    )


_FROZEN = ("token_embd.weight", "output.weight", "rope_freqs.weight")
_VALUE, _TRAINED = 4, 12  # bytes of a weight; and of its gradient and AdamW's two moments, all in float32
_WORKING_BYTES = 1 << 30  # activations and logits of a step


@dataclass(frozen=True)
class TrainedExtent:
    """The part of a drafter that is trained."""

    first: int = 0  # layer that is; what the layers below it compute for a text never changes

    def trains(self, name: str) -> bool:
        """True if a tensor of this name is trained."""
        if name in _FROZEN:
            return False
        kind, _, rest = name.partition(".")
        return kind != "blk" or int(rest.partition(".")[0]) >= self.first

    def n_bytes(self, header: GGUFHeader) -> int:
        """Memory that training takes."""
        sizes = {tensor.name: math.prod(tensor.shape) for tensor in header.tensors}
        trained = sum(size for name, size in sizes.items() if self.trains(name))
        return _VALUE * sum(sizes.values()) + _TRAINED * trained + _WORKING_BYTES


WHOLE = TrainedExtent()


def extent_for(header: GGUFHeader, shape: NetworkShape, available: int) -> TrainedExtent:
    """Return the upper half of a drafter's layers, or as many of them as can be trained in free memory."""
    extents = [TrainedExtent(first) for first in range(shape.layers // 2, shape.layers)]
    for extent in extents:
        if extent.n_bytes(header) <= available:
            return extent
    needed = extents[-1].n_bytes(header)
    raise MemoryLimitError(
        f"Tuning {header.path.name} needs about {readable(needed)} of memory; "
        f"{readable(available)} are free.",
        "Name a smaller drafter with --from, or close other programs.",
        needed,
    )
