"""The kinds of drafters, as a table: what each drafts with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource


@dataclass(frozen=True)
class DrafterKind:
    """The kinds of drafters.

    Attributes:
        model: whether a small model grows the tree.
        proposers: the sources without a model that add to the tree, each to be called once a drafter.
    """

    model: bool
    proposers: Sequence[Callable[[], Proposer]] = ()

    def new_proposers(self) -> list[Proposer]:
        """The proposers of one drafter."""
        return [create() for create in self.proposers]


NO_DRAFTER = "none"

DRAFTER_KINDS: Mapping[str, DrafterKind] = {
    NO_DRAFTER: DrafterKind(model=False),
    "lookup": DrafterKind(model=False, proposers=[TextSource, RecycledSource]),
    "model": DrafterKind(model=True),
    "merged": DrafterKind(model=True, proposers=[TextSource, RecycledSource]),
}
