"""Prompt lookup: what followed the last few tokens when they stood in the text before.

Needs no model (Saxena 2023, prompt lookup decoding). Answers that quote, edit or go on with their prompt
repeat long stretches of it, and a target that is streamed verifies a guess at no extra cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree

_LONGEST = 4
_MOST_PLACES = 8  # places of one n-gram that are remembered: the latest say the most

# The chance that the next token is the one that followed, by the length of the match; rough values,
# whose order is what matters for a tree.
_CHANCE = {1: 0.15, 2: 0.4, 3: 0.6, 4: 0.75}


class LookupDrafter(Drafter):
    """Drafts the continuations of earlier occurrences of the text's end, longest match first."""

    name = "prompt lookup"

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """The tree of what followed earlier occurrences of the text's last tokens."""
        root = TokenTree.root_only(text[-1])
        if not limits.allows_drafting:
            return root
        self._index(text)
        paths: list[tuple[Sequence[int], int]] = []
        seen: set[int] = set()
        for length in range(min(_LONGEST, len(text) - 1), 0, -1):
            for place in reversed(self._places[tuple(text[-length:])]):
                if place < len(text) and place not in seen:
                    seen.add(place)
                    paths.append((text[place : place + limits.depth], length))
        # A longer match says more, so within one tree the shorter ones only fill what is left.
        tree = TokenTree.from_paths(text[-1], [_scored(p, n, limits.min_logprob) for p, n in paths])
        return tree.trimmed(limits.budget, limits.leaves)

    def close(self) -> None:
        """Nothing is held."""

    def _index(self, text: Sequence[int]) -> None:
        """Bring the index up to date with the text: usually a few tokens more than last time."""
        if list(text[: len(self._text)]) != self._text:
            self._text.clear()
            self._places.clear()
        for end in range(len(self._text) + 1, len(text) + 1):
            for length in range(1, min(_LONGEST, end) + 1):
                places = self._places[tuple(text[end - length : end])]
                places.append(end)
                if len(places) > _MOST_PLACES:
                    del places[0]
        self._text = list(text)


def _scored(continuation: Sequence[int], match: int, min_logprob: float) -> tuple[Sequence[int], list[float]]:
    """The part of a continuation that is worth its cost, and its path scores.

    Each token that is right makes the match longer.
    """
    total, scores = 0.0, []
    for i in range(len(continuation)):
        total += math.log(_CHANCE[min(match + i, _LONGEST)])
        if total <= min_logprob:
            break
        scores.append(total)
    return continuation[: len(scores)], scores
