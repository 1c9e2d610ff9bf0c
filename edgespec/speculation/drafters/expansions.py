"""The candidates of a drafter's last tree, kept until the target has decided how the text continues."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.speculation.growth import Chances, Children, Frontier


class Expansions:
    """The candidates of every node that was expanded."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Children, int, int]] = {}
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, frontier: Frontier, children: Children) -> None:
        """One draft step."""
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        for row, (node, parent, token) in enumerate(steps):
            self._rows[node] = children, row, token
            self._nodes[parent, token] = node

    def teach(self, chances: Chances, went_on: Sequence[int]) -> None:
        """Teach the policy which candidates the target chose.

        Args:
            went_on: the tokens that followed the root.
        """
        node: int | None = 0
        for token in went_on:
            if node is None or node not in self._rows:
                break
            children, row, after = self._rows[node]
            chances.learn(children.row(row), after, token)
            node = self._nodes.get((node, token))
