"""A GGUF header, and what it is made of: tensor types, arrays, tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ggml type id -> (elements a block, bytes a block). Ids that are absent were removed from ggml.
# The gguf package has the same table (a test compares them), but importing it takes 80 ms.
BLOCK_SIZES: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}


@dataclass(frozen=True)
class ArrayInfo:
    """A metadata array, of which only the element type's name (such as "string") and the length are kept."""

    element_type: str
    length: int
    # of a short array of integers or truth values, its elements
    values: tuple[int, ...] = field(default=(), compare=False)
    # of an array of strings, the first byte in the file, and the byte after the last one
    byte_range: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in ggml's order (row length first), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    n_bytes: int


# What the settings of layers with a running state are called.
_STATES = ("ssm", "wkv", "kda", "shortconv")


@dataclass(frozen=True)
class GGUFHeader:
    """A checked header; every tensor lies inside the file, after `data_offset`, in file order."""

    path: Path
    version: int
    metadata: dict[str, Any]  # scalars and strings as they are, arrays as ArrayInfo
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int
    file_bytes: int
    fingerprint: str  # 32 hex digits over the header's bytes (metadata, names, shapes, types)

    @property
    def architecture(self) -> str:
        """The architecture, such as "llama"; empty only in the second and later files of a split model."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def is_adapter(self) -> bool:
        """True if this is a LoRA adapter, which has no weights of its own."""
        kinds = self.metadata.get("general.type"), self.metadata.get("adapter.type")
        return kinds == ("adapter", "lora")

    @property
    def block_count(self) -> int | None:
        """Layers; None if the file does not say."""
        return self._count("block_count")

    @property
    def context_length(self) -> int | None:
        """The context the model was trained with, in tokens."""
        return self._count("context_length")

    def doubt_about(self, context: int) -> str:
        """A sentence if the model was trained for a shorter context, in tokens; else empty."""
        trained = self.context_length
        if not trained or context <= trained:
            return ""
        return (
            f"{self.path.name} was trained for {trained} tokens, and the context holds {context}: "
            "longer texts may be answered poorly."
        )

    @property
    def embedding_length(self) -> int | None:
        """Elements of an embedding and of a hidden state."""
        return self._count("embedding_length")

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary; 0 where the file has none."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.length if isinstance(tokens, ArrayInfo) else 0

    @property
    def keeps_running_state(self) -> bool:
        """True if some layers keep a recurrent state instead of keys and values."""
        return any(
            key.startswith(tuple(f"{self.architecture}.{kind}." for kind in _STATES)) for key in self.metadata
        )

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors in this file, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def _count(self, key: str) -> int | None:
        return as_count(self.metadata.get(f"{self.architecture}.{key}"))


def as_count(value: Any) -> int | None:
    """A metadata value that counts something; None if it is anything else."""
    return value if type(value) is int and value >= 0 else None
