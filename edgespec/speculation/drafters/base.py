"""The interfaces of drafters and of what has them draft, and the drafter that drafts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals, Proposer, proposals_of
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

ProposedBy = Literal["model", "text", "recycled", "files", "both"]
"""A model, the text so far, an earlier pass of the target, files, or a model and one of the others."""


@dataclass(frozen=True)
class DraftRequest:
    """A text that a tree is wanted for.

    Attributes:
        limits: of this tree. Where trees grow together, only depth, branching, end tokens and the tree policy
            are its own.
        ranking: how candidates are ranked.
    """

    text: Sequence[int]
    limits: TreeLimits
    ranking: Ranking

    def proposals(self, proposers: Sequence[Proposer]) -> JoinedProposals | None:
        """The proposals of sources for the tree; None if there are none, or its policy merges none."""
        if not proposers or not self.limits.expansion.merges:
            return None
        return proposals_of(proposers, self.text, self.limits.depth)


class Drafter(Protocol):
    """Guesses how a text continues.

    A drafter is given the whole text every time and finds out by itself what is new, so the engine does not
    have to keep its state in step with the target's: a rewound or replaced conversation needs no call.
    """

    name: str  # as shown to users
    steps: int = 0  # decodes that the latest tree took, where they are counted
    rows: int = 0  # nodes read in them
    text_s: float = 0.0  # seconds of a decode among them that read text which was new, beside the root
    reads_target: bool = False  # it drafts only for texts that the target has just computed

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of continuations, rooted at the last token of the text."""

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several texts, whose nodes compete for one budget.

        Drafters that follow one text at a time draft nothing for several.

        Args:
            limits: of all trees together.
        """
        if len(requests) > 1:
            return [TokenTree.root_only(request.text[-1]) for request in requests]
        return [self.draft(request.text, limits, request.ranking) for request in requests]

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of one of the last trees, below its root.

        To be called before `learn`.

        Args:
            index: of the tree, if there were several.
        """
        return ["model"] * (len(tree) - 1)

    def observe(self, text: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        """See what the target said in a pass, drafted for or not. Drafters that have no use for it ignore it.

        Args:
            text: the text that the pass extended; the tree's root is its last token.
            logits: (nodes, n_vocab) the target's, for this call only and not to be changed.
        """
        del text, tree, logits

    def forget_texts(self) -> None:
        """Forget what was kept of texts and passes: the next text is drafted for like the first.

        Drafters that keep nothing ignore this.
        """
        return

    def learn(self, text: Sequence[int], index: int = 0) -> None:
        """Learn from what the target accepted of the last tree.

        To be called only with the target's own choices: what a user types next says nothing about the pair.
        Drafters that do not learn ignore it.

        Args:
            text: the text that the last tree was drafted for, followed by what the target chose.
            index: the place of the text among those that were drafted for together.
        """
        del text, index

    def save_to(self, folder: Path) -> None:
        """Save the cache's state to a folder from now on, and restore it from there.

        Drafters without a cache ignore this.
        """
        del folder

    def save(self) -> None:
        """Write the state of the text that was drafted for last; see `save_to`."""
        return

    def stop_saving(self) -> None:
        """Undo `save_to`."""
        return

    def store_block(self, text: Sequence[int]) -> bool:
        """Write a block of the state of a text that was drafted for to disk, if states are kept there.

        Returns:
            Whether one was written, so that there may be another one.
        """
        del text
        return False

    def close(self) -> None:
        """Free its resources."""


class TreeDrafting(Protocol):
    """Makes a drafter grow the kind of tree that a verification rule needs."""

    def draft(self, drafter: Drafter, text: Sequence[int], limits: TreeLimits) -> DraftedTree:
        """A tree below the last token of the text."""

    def request(self, text: Sequence[int], limits: TreeLimits) -> DraftRequest | None:
        """The request for a tree that grows together with those of other texts; None if it cannot."""
        del text, limits
        return None

    def drafted(self, tree: TokenTree, text: Sequence[int]) -> DraftedTree:
        """The tree to verify, for the request made by `request`."""
        del text
        return DraftedTree(tree)


class NoDrafter(Drafter):
    """Plain decoding: the tree is only its root."""

    name = "none"

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        return TokenTree.root_only(text[-1])

    def close(self) -> None:
        pass
