"""A text that something which is no text was taken out of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SplicedText(list[int]):
    """The tokens of a sequence without those of its images; sources match nothing across the seams.

    Attributes:
        seams: positions in front of which an image stood.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        super().__init__()
        seams: list[int] = []
        for token in tokens:
            if token >= 0:
                self.append(token)
            elif not seams or seams[-1] != len(self):
                seams.append(len(self))
        self.seams = tuple(seams)


def seams_of(sequence: Sequence[int]) -> tuple[int, ...]:
    """The seams of a sequence, if it is a spliced one."""
    return sequence.seams if isinstance(sequence, SplicedText) else ()


def behind_seams(sequence: Sequence[int]) -> Sequence[int]:
    """The part of a sequence behind its last seam; all of it if there is none."""
    seams = seams_of(sequence)
    return sequence[seams[-1] :] if seams else sequence
