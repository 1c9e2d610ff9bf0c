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

ProposedBy = Literal["model", "text", "recycled", "files", "answers", "both", "grammar"]
"""A model, the sequence so far, an earlier pass of the target, files, earlier answers, a model and one of
these, or the form of the answer where it permits one text only."""


@dataclass(eq=False)
class DraftMemory:
    """A drafter's state for one sequence, kept from tree to tree; its owner is the sequence."""

    state: object = None  # the drafter's own object; None if it knows nothing yet


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that a tree is wanted for."""

    sequence: Sequence[int]
    # of this tree. Where trees grow together, only depth, branching, end tokens and the tree policy are its
    # own.
    limits: TreeLimits
    ranking: Ranking  # how candidates are ranked
    # what the drafter keeps of the sequence; None to find by its tokens what is known of it
    memory: DraftMemory | None = None
    own: Sequence[Proposer] = ()  # sources of this sequence alone, which join those of a drafter that has any

    def proposals(self, proposers: Sequence[Proposer]) -> JoinedProposals | None:
        """The proposals of sources for the tree; None if there are none, or its policy merges none."""
        if not proposers or not self.limits.expansion.merges:
            return None
        return self.all_proposals(proposers)

    def all_proposals(self, proposers: Sequence[Proposer]) -> JoinedProposals:
        """The proposals of sources for the tree, whatever its policy."""
        return proposals_of([*proposers, *self.own], self.sequence, self.limits.depth)


class Drafter(Protocol):
    """Guesses how a sequence continues.

    A drafter is given the whole sequence every time and finds out by itself what is new, so the engine does
    not have to keep its state in step with the target's: a rewound or replaced conversation needs no call.
    Where it keeps what it knows of a sequence is the sequence's `DraftMemory`.
    """

    name: str  # as shown to users
    steps: int = 0  # decodes that the latest tree took, where they are counted
    rows: int = 0  # nodes read in them
    text_s: float = 0.0  # seconds of a decode among them that read tokens that were new, beside the root
    reads_target: bool = False  # it drafts only for sequences that the target has just computed

    def draft(self, sequence: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of continuations, rooted at the last token of the sequence."""

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several sequences, whose nodes compete for one budget.

        Drafters that follow one sequence at a time draft nothing for several.

        Args:
            limits: of all trees together.
        """
        if len(requests) > 1:
            return [TokenTree.root_only(request.sequence[-1]) for request in requests]
        return [self.draft(request.sequence, limits, request.ranking) for request in requests]

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of one of the last trees, below its root.

        To be called before `learn`.

        Args:
            index: of the tree, if there were several.
        """
        return ["model"] * (len(tree) - 1)

    def observe(self, sequence: Sequence[int], tree: TokenTree, logits: FloatArray) -> None:
        """See what the target said in a pass, drafted for or not. Drafters that have no use for it ignore it.

        Args:
            sequence: the sequence that the pass extended; the tree's root is its last token.
            logits: (nodes, n_vocab) the target's, for this call only and not to be changed.
        """
        del sequence, tree, logits

    def forget_sequences(self) -> None:
        """Forget what was kept of sequences and passes: the next sequence is drafted for like the first.

        Drafters that keep nothing ignore this.
        """
        return

    def learn(self, sequence: Sequence[int], index: int = 0) -> None:
        """Learn from what the target accepted of the last tree.

        To be called only with the target's own choices: what a user types next says nothing about the pair.
        Drafters that do not learn ignore it.

        Args:
            sequence: the sequence that the last tree was drafted for, followed by what the target chose.
            index: the place of the sequence among those that were drafted for together.
        """
        del sequence, index

    def recall(self, sequence: Sequence[int], folder: Path) -> None:
        """Restore the state of a sequence, of which nothing is drafted for yet, from a folder.

        Drafters without a cache ignore this.
        """
        del sequence, folder

    def save(self, sequence: Sequence[int], folder: Path) -> None:
        """Make a folder hold the state of a sequence that was drafted for, and of no other; see `recall`."""
        del sequence, folder

    def store_block(self, sequence: Sequence[int]) -> bool:
        """Write a block of the state of a sequence that was drafted for to disk, if states are kept there.

        Returns:
            Whether one was written, so that there may be another one.
        """
        del sequence
        return False

    def close(self) -> None:
        """Free its resources."""


class TreeDrafting(Protocol):
    """Makes a drafter grow the kind of tree that a verification rule needs."""

    def draft(
        self,
        drafter: Drafter,
        sequence: Sequence[int],
        limits: TreeLimits,
        memory: DraftMemory | None = None,
    ) -> DraftedTree:
        """A tree below the last token of the sequence."""

    def request(
        self, sequence: Sequence[int], limits: TreeLimits, memory: DraftMemory | None = None
    ) -> DraftRequest | None:
        """The request for a tree that grows together with those of other sequences; None if it cannot."""
        del sequence, limits, memory
        return None

    def drafted(self, tree: TokenTree, sequence: Sequence[int]) -> DraftedTree:
        """The tree to verify, for the request made by `request`."""
        del sequence
        return DraftedTree(tree)


class NoDrafter(Drafter):
    """Plain decoding: the tree is only its root."""

    name = "none"

    def draft(self, sequence: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        return TokenTree.root_only(sequence[-1])

    def close(self) -> None:
        pass
