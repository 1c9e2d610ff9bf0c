"""Draws a token tree: what was drafted, what the target accepted, and its own choice at the end.

The accepted path runs down the left edge, so that depth takes no horizontal space. Rejected drafts branch off
it, with a run of tokens on one line. The percentages are the drafter's: the chance of each token after those
before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from edgespec.speculation.tree import Acceptance, TokenTree

_ACCEPTED, _REJECTED, _BONUS = "green", "dim", "bold cyan"
_MAX_BRANCHES = 4  # rejected branches drawn per node


def draw_tree(
    tree: TokenTree, accepted: Acceptance, piece: Callable[[int], bytes], columns: int = 80
) -> list[Text]:
    """Lines that show the tree, none wider than `columns`.

    Args:
        piece: the bytes of a token, control tokens spelled out.
    """
    return _Drawing(tree, accepted, piece, columns).lines()


class _Drawing:
    def __init__(
        self, tree: TokenTree, accepted: Acceptance, piece: Callable[[int], bytes], columns: int
    ) -> None:
        self._tree = tree
        self._accepted = accepted
        self._piece = piece
        self._columns = columns
        self._children: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(tree.parents.tolist()):
            if parent >= 0:
                self._children[parent].append(node)
        for children in self._children.values():
            children.sort(key=lambda node: -float(tree.logprobs[node]))

    def lines(self) -> list[Text]:
        tree, path = self._tree, self._accepted.path
        drafted, taken = len(tree) - 1, len(path) - 1
        heading = f"{drafted} drafted token{'' if drafted == 1 else 's'}, {taken} accepted, and the next one:"
        if len(heading) > self._columns:
            heading = f"{drafted} drafted, {taken} accepted, then:"
        lines = [
            Text(heading),
            Text.assemble("● ", (self._token(0), ""), ("  the text so far ends here", "dim")),
        ]
        for place, node in enumerate(path):
            if place:
                lines.append(Text(f"● {self._with_chance(node)}", style=_ACCEPTED))
            following = path[place + 1] if place + 1 < len(path) else None
            lines += self._beside(node, following)
        bonus = _shown(self._piece(self._accepted.bonus))
        lines.append(Text.assemble((f"◆ {bonus}", _BONUS), ("  the target's own choice", "dim")))
        for line in lines:
            line.truncate(self._columns, overflow="ellipsis")
        return lines

    def _beside(self, node: int, following: int | None) -> list[Text]:
        """The rejected children of a node on the path."""
        rejected = [child for child in self._children[node] if child != following]
        lines = []
        shown = rejected[:_MAX_BRANCHES]
        for place, child in enumerate(shown):
            last = place == len(shown) - 1 and len(rejected) == len(shown)
            lines += self._branch(child, "│ ", "╰ " if last else "├ ", "  " if last else "│ ")
        if len(rejected) > len(shown):
            more = sum(self._size(child) for child in rejected[_MAX_BRANCHES:])
            lines.append(Text(f"│ ╰ {more} more", style=_REJECTED))
        return lines

    def _branch(self, node: int, edge: str, corner: str, below: str) -> list[Text]:
        """A rejected node: its run down to the next fork on one line, and what follows below."""
        run = [node]
        while len(self._children[run[-1]]) == 1:
            run.append(self._children[run[-1]][0])
        text = " · ".join(self._with_chance(n) for n in run)
        lines = [Text(f"{edge}{corner}{text}", style=_REJECTED)]
        children = self._children[run[-1]]
        for child in children:
            last = child == children[-1]
            lines += self._branch(child, edge + below, "╰ " if last else "├ ", "  " if last else "│ ")
        return lines

    def _size(self, node: int) -> int:
        return 1 + sum(self._size(child) for child in self._children[node])

    def _with_chance(self, node: int) -> str:
        above = float(self._tree.logprobs[self._tree.parents[node]])
        chance = math.exp(min(float(self._tree.logprobs[node]) - above, 0.0))
        return f"{self._token(node)} {_percent(chance)}"

    def _token(self, node: int) -> str:
        return _shown(self._piece(int(self._tree.tokens[node])))


def _shown(piece: bytes) -> str:
    """A token for people: no leading space; line ends and lone spaces as symbols."""
    from edgespec.printable import printable

    text = printable(piece.decode("utf-8", "replace").replace("\n", "⏎").replace("\t", "⇥"))
    return text.strip(" ") or "␣" * len(text) or "∅"


def _percent(chance: float) -> str:
    return "<1%" if chance < 0.005 else f"{chance:.0%}"
