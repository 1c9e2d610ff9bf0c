"""The drafts of one batch: how large its trees may be, and who drafts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.engine.sequence import Batch, Sequence, Sizer
from edgespec.engine.target import Target
from edgespec.generation.decisions import Decisions
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sizing.sizers import FixedSizer, PassRoom
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.verification.base import DraftedTree


@dataclass(frozen=True)
class Drafts:
    """The drafts of one batch.

    Attributes:
        trees: one for each sequence.
        asked: indices of the sequences that the drafter was asked for, in its own order.
    """

    trees: list[DraftedTree]
    asked: list[int]


def limits_for(target: Target, limits: TreeLimits | None, tree_budget: int | None) -> TreeLimits:
    """Limits that no tree may exceed.

    Args:
        limits: those that are asked for; None for none.
        tree_budget: the size that is asked for; None to follow the measured cost.
    """
    most = limits or TreeLimits(budget=target.max_nodes)
    most = replace(
        most,
        budget=min(tree_budget or most.budget, target.max_nodes),
        leaves=min(most.leaves, target.max_leaves),
        is_end=target.model.vocabulary.ends,
    )
    if target.rule is not None and target.model.weights.expert_use is None:
        # Passes are padded to these rows anyway, so filling them costs nothing.
        most = replace(
            most, row_multiple=target.rule.multiple, free_nodes=min(target.rule.minimum, most.budget)
        )
    if most.leaves == 1:
        most = replace(most, width=1, branching=1)
    return most


def draft_batch(batch: Batch, drafter: Drafter, target: Target, sizer: Sizer, decisions: Decisions) -> Drafts:
    """Draft a tree for each sequence of a batch; note who proposed the nodes of those that are traced.

    Args:
        sizer: decides how large the trees of shared passes are.
    """
    own = batch.dedicated_to
    if own is not None:
        drafts = _draft_one(own, drafter, target, decisions)
    else:
        drafts = _draft_together(batch, drafter, target, sizer, decisions)
    for sequence in batch.sequences:
        sequence.proposed_by = []
    for place, index in enumerate(drafts.asked):
        if batch.sequences[index].is_traced:  # now, as the drafter forgets it when it learns from the trees
            tree = drafts.trees[index].tree
            batch.sequences[index].proposed_by = drafter.proposed_by(tree, place)
    return drafts


def _draft_one(sequence: Sequence, drafter: Drafter, target: Target, decisions: Decisions) -> Drafts:
    """The tree of a sequence that has a pass to itself: its method may prescribe what kind of tree."""
    unread = sequence.unread
    room = PassRoom(target.most_unread + 1 - unread, unread) if unread else None
    limits = sequence.clamp(_limits(target, sequence.sizer, decisions, 1, room))
    if not limits.allows_drafting and not drafter.reads_target:
        # Where a pass takes a few milliseconds, it would show what a drafter does to draft nothing.
        return Drafts([DraftedTree(TokenTree.root_only(sequence.tokens[-1]))], [])
    return Drafts([sequence.method.drafting.draft(drafter, sequence.tokens, limits)], [0])


def _draft_together(
    batch: Batch, drafter: Drafter, target: Target, sizer: Sizer, decisions: Decisions
) -> Drafts:
    """The trees of a shared pass, from one search.

    The rows that neither the sequences nor the prompts need go to drafted nodes, of whichever sequences they
    are worth most for.
    """
    sequences, other_rows = batch.sequences, batch.other_rows
    most = target.max_nodes - batch.scored_rows
    room = PassRoom(min(batch.max_rows - other_rows, most), other_rows)
    trees = [DraftedTree(TokenTree.root_only(sequence.tokens[-1])) for sequence in sequences]
    if not sequences or room.nodes <= len(sequences):
        return Drafts(trees, [])
    limits = _limits(target, sizer, decisions, len(sequences), room)
    # Under some rules the text depends on its trees, so nothing else may influence them.
    requests = {
        index: request
        for index, sequence in enumerate(sequences)
        if sequence.method.rule.kind.invariant
        and (request := sequence.method.drafting.request(sequence.tokens, sequence.clamp(limits))) is not None
    }
    plain = len(sequences) - len(requests)
    limits = replace(
        limits,
        budget=limits.budget - plain,
        free_nodes=max(limits.free_nodes - plain, 1),
        leaves=min(limits.leaves, len(requests) + target.n_free_leaves),
    )
    if limits.budget <= len(requests):
        return Drafts(trees, [])
    grown = drafter.draft_together(list(requests.values()), limits)
    for index, tree in zip(requests, grown, strict=True):
        trees[index] = sequences[index].method.drafting.drafted(tree, sequences[index].tokens)
    return Drafts(trees, list(requests))


def _limits(
    target: Target, sizer: Sizer, decisions: Decisions, sequences: int, room: PassRoom | None
) -> TreeLimits:
    """Limits of the next trees, with what is forced."""
    if decisions.drafting:
        sizer = FixedSizer(sizer.most)
    limits = sizer.limits(sequences, room)
    if (most := target.max_nodes - target.n_pending) < limits.budget:
        limits = replace(limits, budget=most, free_nodes=min(limits.free_nodes, most))
    return replace(limits, budget=sequences) if decisions.drafting is False else limits
