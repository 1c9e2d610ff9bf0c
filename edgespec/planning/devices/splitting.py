"""Layers on one card, some of them without their feed-forward weights, which stay on this machine.

Attention with its keys and values is on the card then, of all layers or of as many as there is room for, so
that long texts cost the processor little. Feed-forward weights follow as far as there is room. llama.cpp's
`--n-cpu-ffn` places weights in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import (
    CLEARLY_FASTER,
    FEED_FORWARD,
    USUAL_ROWS,
    LayerAssignment,
    hidden_bytes,
    layer_seconds,
    layer_tensors,
    output_bytes,
    transfer_seconds,
    used_bytes,
)
from edgespec.planning.devices.cards import Cards
from edgespec.planning.memory.needs import MemoryNeeds

_ATTENDING = 4  # times what one row takes, for USUAL_ROWS rows to attend to a long text on a processor


@dataclass(frozen=True)
class SplitSizes:
    """Bytes of a model's parts."""

    feed_forward: Sequence[int]  # of each layer's feed-forward weights
    others: Sequence[int]  # of each layer's other weights, with its keys and values
    output: int  # of the matrix that makes logits

    @classmethod
    def of(cls, files: ModelFiles, needs: MemoryNeeds) -> SplitSizes:
        layers = layer_tensors(files)
        cells = needs.footprints[0].cache // max(len(layers), 1)
        feed_forward = [sum(t.n_bytes for t in layer if FEED_FORWARD.fullmatch(t.name)) for layer in layers]
        others = [sum(t.n_bytes for t in layer) + cells for layer in layers]
        others = [size - kept for size, kept in zip(others, feed_forward, strict=True)]
        return cls(feed_forward, others, output_bytes(files))


@dataclass(frozen=True)
class Split:
    """The parts of a model that are not on the card with the rest."""

    here: int  # first layers of which nothing is
    kept: int  # layers after these whose feed-forward weights are not
    output: bool  # whether the output is on the card


def fill_card(sizes: SplitSizes, room: int) -> Split | None:
    """The split that fills a card with attention first; None if it has no room for that of one layer.

    A layer's time falls about evenly with its bytes on the card. So the fastest split has either the most
    attention that fits, or whole layers, and those between need not be tried.

    Args:
        room: bytes of its memory for weights, keys and values.
    """
    n_layers, left = len(sizes.others), room
    here = n_layers
    while here and sizes.others[here - 1] <= left:
        here -= 1
        left -= sizes.others[here]
    if here == n_layers:
        return None
    output = here == 0 and sizes.output <= left
    left -= sizes.output if output else 0
    first = n_layers  # whose feed-forward weights are on the card
    while first > here and sizes.feed_forward[first - 1] <= left:
        first -= 1
        left -= sizes.feed_forward[first]
    return Split(here, first - here, output)


@dataclass(frozen=True)
class AssignmentCosts:
    """The time of passes with different assignments of one model."""

    cards: Cards  # devices that may hold layers
    files: ModelFiles  # the model
    needs: MemoryNeeds  # as if everything were on the processor
    here: int  # bytes of this machine's memory for layers
    read_rate: float  # bytes of weights that the disk reads per second

    def seconds(self, assignment: LayerAssignment) -> float:
        """Seconds of a pass of `USUAL_ROWS` rows after a text of half the context.

        What no assignment changes is left out.
        """
        layers = layer_tensors(self.files)
        total = sum(t.n_bytes for layer in layers for t in layer)
        own_s, *there_s = (s * len(layers) / total for s in layer_seconds(self.cards, self.files))  # a byte
        own_row_s, *_ = (s * len(layers) / total for s in layer_seconds(self.cards, self.files, rows=1))
        cells, output = self.needs.footprints[0].cache / len(layers), output_bytes(self.files)
        used = used_bytes(self.files)
        used_here = sum(
            used.get(t.name, 0.0) for layer in layers for t in layer if t.name not in assignment.names
        )
        bytes_here = total - assignment.lent_bytes
        streamed = max(bytes_here + assignment.here * cells - max(self.here, 0), 0) / max(bytes_here, 1)
        read_s = max(1 / self.read_rate - own_s, 0.0)  # beyond what computing takes meanwhile
        seconds = used_here * (own_s + streamed * read_s)
        seconds += assignment.here * cells / 2 * _ATTENDING * own_row_s
        seconds += 0 if assignment.output else output * own_s
        parts = assignment.parts(list(zip(self.cards.devices, there_s, strict=True)), self.files)
        for part in parts:
            card, card_s = part.device
            n_bytes = part.used_bytes(used) + part.layers * cells / 2
            n_bytes += output if assignment.output and part is parts[-1] else 0
            trip_s = transfer_seconds(card, USUAL_ROWS * hidden_bytes(self.files))
            seconds += CLEARLY_FASTER * n_bytes * card_s + (1 + part.kept) * trip_s
        return seconds
