"""The headers of Gemma 4's assistants.

An assistant drafts for one target (its files are called so: `gemma-4-31B-it-assistant`). It is a small model
in a file of its own that has no keys and values: its queries look at those that the target has cached of the
text. Like a layer for multi-token prediction, it reads the target's last state beside the last token.
llama.cpp aborts over assistants that do not fit, so what it would assert is checked here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.heads.head import Head, HeadHeader, another_target
from edgespec.heads.head_context import HeadContext
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.head_family import HeadFamily
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader, as_count

TARGET = "gemma4"
"""The architecture of its targets."""

_HINT = "Name the assistant that was made for this model, or an ordinary drafter."


@dataclass(frozen=True)
class AssistantHead(Head):
    role = HeadFamily.ASSISTANT.value
    keeps_cells = False  # it computes in its target's

    header: GGUFHeader
    target_width: int  # elements of the target's states, and of its own features

    @property
    def shown_width(self) -> int:
        """Elements of the target's last state."""
        return self.target_width

    def require_fit(self, target: ModelFiles) -> None:
        """Make sure that the assistant was made for a model like this target; see Head."""
        if why := self._misfit(target.headers[0]):
            raise another_target(f"The assistant {self.header.path.name}", target.headers[0], why, _HINT)

    def _misfit(self, target: GGUFHeader) -> str:
        """The reason why it was not made for a model like this target; empty if it was."""
        if target.architecture != TARGET:
            return f"it drafts for the architecture {TARGET}, not {target.architecture}"
        width = target.embedding_length
        if self.target_width != width:
            return f"it reads states of {self.target_width} elements, not {width}"
        last = (target.block_count or 0) - 1
        if _array(target, "attention.sliding_window_pattern", [last - 1, last]) not in ([1, 0], None):
            return "it reads one layer with a sliding window and one without, which must be the last two"
        for sliding, layer in ((True, last - 1), (False, last)):
            found = _cached(target, layer, sliding=sliding)
            for index in _layers_with(self.header, sliding=sliding):
                if (wanted := _cached(self.header, index, sliding=sliding)) != found:
                    return (
                        f"it looks at {_described(*wanted)} in layer {layer}, and there are "
                        f"{_described(*found)}"
                    )
        return ""


def read_assistant_head(header: GGUFHeader) -> AssistantHead:
    head = HeadHeader(header, "assistant")
    width, target_width = head.count("embedding_length"), head.count("embedding_length_out")
    layers = head.count("block_count")
    if head.count("nextn_predict_layers") != layers:
        head.refuse("not all of its layers predict further tokens")
    for name, shape in (
        ("nextn.pre_projection.weight", (2 * target_width, width)),
        ("nextn.post_projection.weight", (width, target_width)),
    ):
        tensor = head.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else list(tensor.shape)
            head.refuse(f"its tensor {name} is {found} instead of {list(shape)}")
    return AssistantHead(header, target_width)


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


class AssistantContext(HeadContext):
    """A context of an assistant beside its target's, whose cells it shares; empties them.

    Args:
        beside: the target's context. It must stay open as long as this one computes.
        n_cells: has no effect: there are as many as the target has.
    """

    def __init__(
        self,
        model: Model,
        beside: Context | None,
        *,
        n_cells: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
    ) -> None:
        assert beside is not None
        super().__init__(
            model,
            beside,
            n_cells=beside.n_cells,
            n_sequences=n_sequences,
            n_threads=n_threads,
            abort=abort,
        )
        self.width = model.output_width
        beside.clear()  # the cells are empty, so the next rows take the first ones

    def draft(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], features: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Read tokens behind what the target has cached of their sequences.

        Args:
            positions: for each token, the number of tokens that the target has cached of its sequence.
            sequences: the target's id of the sequence of each.
            features: (tokens, width) of the token before each.

        Returns:
            The logits (tokens, n_vocab) after each, a view that is valid until the next decode; and the
            features (tokens, width) of each.

        Raises:
            DecodeAborted: the abort flag was set.
            NoRoomInCache: too few cells are free.
        """
        rows = len(tokens)
        self.decode(
            TokenBatch(
                tokens=np.asarray(tokens, dtype=np.int32),
                positions=np.asarray(positions, dtype=np.int32),
                sequence_ids=np.asarray(sequences, dtype=np.int32),
                offsets=np.arange(rows + 1, dtype=np.int64),
                wants_logits=np.ones(rows, dtype=np.bool_),
                features=features,
            )
        )
        return self.logits(), self.features(rows)

    def draft_from_zeros(self, known: int) -> None:
        """Draft a token as if the target's last state were zero; see HeadContext."""
        self.draft([0], [known], [0], np.zeros((1, self.width), dtype=np.float32))

    def clear(self) -> None:
        """Leave the cells alone: they are the target's."""
