"""The rows of an image in a sequence: embeddings, each of which takes the place of a token.

In a list of tokens, the rows have ids below zero. These are derived from the embeddings, so whatever compares
or hashes tokens tells images apart as well. No vocabulary has such tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_IDS = 2**31 - 1  # -2 and the ids below it, as far as 32 bits reach


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Consecutive rows of one image."""

    values: NDArray[np.float32]  # (rows, width) the embeddings
    causal: bool  # whether each row sees the rows before it alone; otherwise it sees all of them
    # (rows, 2) height and width of each row in the image, for models with M-RoPE; None for others
    places: NDArray[np.int32] | None = None
    positions: int = 0  # how many positions the rows take, for models with M-RoPE

    def positions_from(self, start: int, first: int, last: int) -> NDArray[np.int32]:
        """The positions of rows first .. last - 1 for a batch, where the image begins at `start`."""
        if self.places is None:
            return np.arange(start + first, start + last, dtype=np.int32)
        places = self.places[first:last]
        time = np.full(len(places), start, dtype=np.int32)
        return np.concatenate([time, start + places[:, 0], start + places[:, 1], np.zeros_like(time)])

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The ids that stand for the rows among tokens."""
        digest = hashlib.shake_128(b"causal" if self.causal else b"all")
        digest.update(repr(self.values.shape).encode())
        if self.places is not None:
            digest.update(np.ascontiguousarray(self.places).data)
        digest.update(np.ascontiguousarray(self.values).data)
        numbers = np.frombuffer(digest.digest(4 * len(self)), dtype="<u4") % _IDS
        return tuple((-2 - numbers.astype(np.int64)).tolist())


@dataclass(frozen=True)
class PlacedImage:
    """Rows of an image, and where they are in a sequence."""

    start: int  # position of the first
    rows: ImageRows

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.rows)


def placed_images(tokens: Sequence[int], known: Mapping[int, ImageRows]) -> Iterator[PlacedImage]:
    """The images in a sequence.

    Args:
        known: rows by the first of their ids.

    Raises:
        KeyError: an image is not known.
    """
    at = 0
    while at < len(tokens):
        if tokens[at] >= 0:
            at += 1
            continue
        rows = known[tokens[at]]
        if tuple(tokens[at : at + len(rows)]) != rows.ids:
            raise KeyError(tokens[at])
        yield PlacedImage(at, rows)
        at += len(rows)
