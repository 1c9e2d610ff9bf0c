"""Positions of a sequence's tokens.

A token's position is its index, unless images are before it in a model with M-RoPE (Wang et al. 2024,
Qwen2-VL, section 2.1). All rows of such an image have one position in time, and the image takes as many
positions as it has rows or columns, whichever are more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.llama.runtime.batch import EmbeddedBatch, TokenBatch


@dataclass(frozen=True)
class RowSpan:
    """Rows that take fewer positions than there are rows."""

    start: int  # index of the first
    rows: int  # how many
    positions: int  # that they take

    @property
    def end(self) -> int:
        """The index behind the last row."""
        return self.start + self.rows


class Positions:
    """The positions of the tokens of one sequence.

    Args:
        spans: in order; those of rows that take a position each are left out.
    """

    def __init__(self, spans: Iterable[RowSpan] = ()) -> None:
        self._spans = tuple(span for span in spans if span.positions != span.rows)

    def __bool__(self) -> bool:
        """Return True if some positions differ from indexes."""
        return bool(self._spans)

    def at(self, index: int) -> int:
        """The position of a token; for a row in a span, that of the span."""
        position = index
        for span in self._spans:
            if span.end <= index:
                position -= span.rows - span.positions
            elif span.start < index:
                position -= index - span.start
        return position

    def behind(self, index: int) -> int:
        """The position behind those of the tokens before an index; rows of a span that was begun have one."""
        return self.at(index) + (self.floor(index) < index)

    def of(self, indexes: NDArray[np.int32]) -> NDArray[np.int32]:
        """The positions of tokens, none of which is in a span; of the shape of `indexes`."""
        positions = indexes.copy()
        for span in self._spans:
            positions[indexes >= span.end] -= span.rows - span.positions
        return positions

    def placed(self, batch: TokenBatch) -> TokenBatch:
        """A batch with positions in place of indexes; embeddings have positions already."""
        if not self or isinstance(batch, EmbeddedBatch):
            return batch
        return replace(batch, positions=self.of(batch.positions))

    def floor(self, index: int) -> int:
        """The largest index up to this one that is not within a span."""
        return next((span.start for span in self._spans if span.start < index < span.end), index)

    def ceiling(self, index: int) -> int:
        """The smallest index from this one on that is not within a span."""
        return next((span.end for span in self._spans if span.start < index < span.end), index)
