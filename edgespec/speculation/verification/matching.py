"""Choose the next token and check whether the tree holds it: the skeleton of most rules."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.speculation.tree import TokenTree
from edgespec.speculation.verification.base import Acceptance


def sample_and_match(tree: TokenTree, choose: Callable[[int], int]) -> Acceptance:
    """The target chooses token after token, with no further pass for as long as the tree holds its choice.

    The drafter has no influence on the choice, so the text is the target's own whatever the tree
    (SpecExec, Svirschevski et al. 2024, section 4). With greedy choices this is argmax matching; with
    shared noise it is drafter-invariant sampling.

    Args:
        choose: returns the target's token after a node, drawn from its distribution there.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)
