"""Assistants of Gemma 4: what the header of one says, and whether it fits a target.

An assistant drafts for one target (its files are called so: `gemma-4-31B-it-assistant`). It is a small model
in a file of its own that has no keys and values: its queries look at those that the target has cached of the
text. Like a layer for multi-token prediction, it reads the target's last state beside the last token.
llama.cpp aborts over assistants that do not fit, so what it would assert is checked here first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from edgespec.errors import ModelFileError, PairingError
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader, as_count

ARCHITECTURE = "gemma4-assistant"
TARGET = "gemma4"
"""The architecture of its targets."""

_HINT = "Name the assistant that was made for this model, or an ordinary drafter."


@dataclass(frozen=True)
class Assistant:
    """The header of an assistant.

    Attributes:
        target_width: elements of the target's states, and of its own features.
    """

    header: GGUFHeader
    target_width: int

    @property
    def name(self) -> str:
        """The file's name."""
        return self.header.path.name


def is_assistant(header: GGUFHeader) -> bool:
    """True if a file is an assistant, which is of no use without its target."""
    return header.architecture == ARCHITECTURE


def read_assistant(header: GGUFHeader) -> Assistant:
    """Read the header of an assistant.

    Raises:
        ModelFileError: it lacks something, or contradicts itself.
    """
    width, target_width = _count(header, "embedding_length"), _count(header, "embedding_length_out")
    layers = _count(header, "block_count")
    if _count(header, "nextn_predict_layers") != layers:
        _damaged(header, "not all of its layers predict further tokens")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, shape in (
        ("nextn.pre_projection.weight", (2 * target_width, width)),
        ("nextn.post_projection.weight", (width, target_width)),
    ):
        if shapes.get(name) != shape:
            found = list(shapes[name]) if name in shapes else "missing"
            _damaged(header, f"its tensor {name} is {found} instead of {list(shape)}")
    return Assistant(header, target_width)


def require_assistant_fits(assistant: Assistant, target: ModelFiles) -> None:
    """Make sure that an assistant was made for a model like this target.

    The vocabularies' tokens are compared when both are loaded.

    Raises:
        PairingError: it was not.
    """
    header = target.headers[0]
    made = f"The assistant {assistant.name} was made for another target than {header.path.name}: "
    if header.architecture != TARGET:
        raise PairingError(
            f"{made}it drafts for the architecture {TARGET}, not {header.architecture}.",
            _HINT,
        )
    width = as_count(header.metadata.get(f"{TARGET}.embedding_length"))
    if assistant.target_width != width:
        raise PairingError(f"{made}it reads states of {assistant.target_width} elements, not {width}.", _HINT)
    last = (header.block_count or 0) - 1
    if _array(header, "attention.sliding_window_pattern", [last - 1, last]) not in ([1, 0], None):
        raise PairingError(
            f"{made}it reads one layer with a sliding window and one without, which must be the last two.",
            _HINT,
        )
    own = assistant.header
    for sliding, layer in ((True, last - 1), (False, last)):
        found = _cached(header, layer, sliding=sliding)
        for index in _layers_with(own, sliding=sliding):
            if (wanted := _cached(own, index, sliding=sliding)) != found:
                raise PairingError(
                    f"{made}it looks at {_described(*wanted)} in layer {layer}, and there are "
                    f"{_described(*found)}.",
                    _HINT,
                )


def _cached(header: GGUFHeader, layer: int, *, sliding: bool) -> tuple[int | None, int | None]:
    """Heads of keys and values in a layer, and elements of each."""
    heads = header.metadata.get(f"{header.architecture}.attention.head_count_kv")
    if isinstance(heads, ArrayInfo):
        heads = heads.values[layer] if layer < len(heads.values) else None
    ending = "_swa" if sliding else ""
    length = header.metadata.get(f"{header.architecture}.attention.key_length{ending}")
    if length is None:
        length = header.metadata.get(f"{header.architecture}.attention.key_length")
    return as_count(heads), as_count(length)


def _layers_with(header: GGUFHeader, *, sliding: bool) -> list[int]:
    """The layers that have a window, or those that have none."""
    layers = list(range(header.block_count or 0))
    found = _array(header, "attention.sliding_window_pattern", layers)
    return [] if found is None else [layer for layer in layers if bool(found[layer]) == sliding]


def _array(header: GGUFHeader, key: str, places: list[int]) -> list[int] | None:
    """The elements of an array at these places; None if it is too long to be kept, or missing."""
    array: Any = header.metadata.get(f"{header.architecture}.{key}")
    if (
        not isinstance(array, ArrayInfo)
        or not places
        or not 0 <= min(places) <= max(places) < len(array.values)
    ):
        return None
    return [int(array.values[place]) for place in places]


def _described(heads: int | None, length: int | None) -> str:
    return f"{heads} heads of {length} elements"


def _count(header: GGUFHeader, key: str) -> int:
    value = as_count(header.metadata.get(f"{header.architecture}.{key}"))
    if not value:
        _damaged(header, f"it lacks its {key.replace('_', ' ')}")
    return value


def _damaged(header: GGUFHeader, what: str) -> NoReturn:
    raise ModelFileError(
        f"The assistant {header.path} cannot be used: {what}.", "Get another conversion of the assistant."
    )
