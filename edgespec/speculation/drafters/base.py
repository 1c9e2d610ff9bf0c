"""What every drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree


class Drafter(Protocol):
    """Guesses how a text goes on.

    A drafter is told the whole text every time and finds out by itself what is new, so the engine keeps
    no drafter state in step with the target's: a rewound or replaced conversation needs no call.
    """

    name: str  # what people call it
    steps: int = 0  # decodes that the latest tree took, where they are counted
    rows: int = 0  # nodes that were read in them

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of continuations, rooted at the last token of the text."""

    def save_to(self, folder: Path) -> None:
        """Keep the state of what is read in a folder from now on, and take it up from there.

        Drafters that read nothing keep nothing.
        """
        del folder

    def save(self) -> None:
        """Write the state of the text as it was last drafted for; see `save_to`."""
        return

    def stop_saving(self) -> None:
        """Undo `save_to`."""
        return

    def close(self) -> None:
        """Free what it holds."""


class NoDrafter(Drafter):
    """Plain decoding: the tree is its root."""

    name = "none"

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        return TokenTree.root_only(text[-1])

    def close(self) -> None:
        pass
