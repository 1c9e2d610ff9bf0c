"""Cells that behave like llama.cpp's, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.llama.runtime.batch import TokenBatch

N_SEQUENCES = 8


@dataclass
class _Cell:
    position: int
    token: int
    sequences: set[int] = field(default_factory=set)


class Cells:
    """The part of a context that a cache uses: cells that sequences share.

    Args:
        window: of sliding-window layers. Of cells that may be reused, this reuses all.
    """

    n_sequences = N_SEQUENCES
    n_cells = 10_000
    branches = keeps_recurrent_state = False

    def __init__(self, *, can_shift: bool = True, window: int = 0) -> None:
        self.window = window
        self.keeper_id = N_SEQUENCES if window else None
        self.cells: list[_Cell] = []
        self.can_shift = can_shift
        self.n_read = 0

    def decode(self, batch: TokenBatch) -> None:
        self.n_read += len(batch)
        self.cells = [cell for cell in self.cells if not self._reusable(cell)]
        for row in range(len(batch)):
            sequences = batch.sequence_ids[batch.offsets[row] : batch.offsets[row + 1]].tolist()
            self.cells.append(_Cell(int(batch.positions[row]), int(batch.tokens[row]), set(sequences)))

    def _reusable(self, cell: _Cell) -> bool:
        """True if the end of the cell's only sequence does not see it."""
        if not self.window or len(cell.sequences) > 1:
            return False
        last = max(other.position for other in self.cells if cell.sequences & other.sequences)
        return last + 1 - cell.position >= self.window

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        for cell in self.cells:
            if source in cell.sequences and start <= cell.position and (end < 0 or cell.position < end):
                cell.sequences.add(destination)

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        for cell in self.cells:
            if start <= cell.position and (end < 0 or cell.position < end):
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]
        return True

    def shift(self, sequence: int, start: int, by: int) -> None:
        for cell in self.cells:
            if sequence in cell.sequences and start <= cell.position:
                cell.position += by

    def seen(self, sequence: int, position: int) -> list[int]:
        """Positions that a row of a sequence attends to, in order."""
        seen = [c for c in self.cells if sequence in c.sequences and c.position <= position]
        assert len({cell.position for cell in seen}) == len(seen), "two tokens in one place"
        return [cell.token for cell in sorted(seen, key=lambda cell: cell.position)]
