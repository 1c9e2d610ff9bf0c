"""Which path of a verified tree is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.speculation.tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """What a pass yields.

    Attributes:
        path: accepted nodes from the root, the root included.
        bonus: the token the target chose after the last of them.
    """

    path: tuple[int, ...]
    bonus: int


def sample_and_look_up(tree: TokenTree, choose: Callable[[int], int]) -> Acceptance:
    """The target chooses token after token; as long as the tree holds its choice, it costs nothing.

    The drafter plays no part in the choice, so the text is the target's own whatever the tree
    (SpecExec, Svirschevski et al. 2024, section 4). With greedy choices this is argmax matching; with
    shared noise it is drafter-invariant sampling.

    Args:
        choose: gives the target's token after a node, a draw from its distribution there.
    """
    path = [0]
    while True:
        token = choose(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)
