"""Prompt lookup: propose what followed the last few tokens where they occurred earlier in the text.

Needs no model (Saxena 2023, prompt lookup decoding). Answers that quote, edit or continue their prompt repeat
long stretches of it, and a streamed target verifies a guess at no extra cost. Together with a model drafter,
these continuations are further candidates, and evidence for the model's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from edgespec.speculation.drafters.proposers import Proposals, Proposer
from edgespec.speculation.growth import Children, Frontier

_LONGEST = 4
_MOST_PLACES = 8  # occurrences of an n-gram that are remembered: the latest are the best evidence


class Continuations(Proposals):
    """What followed earlier occurrences of a text's end, as a tree that is looked up node by node.

    Each node gets the tokens that followed it, with the length of the match: how many of the tokens before
    the candidate also preceded its earlier occurrence.
    """

    def __init__(self, paths: Sequence[tuple[Sequence[int], int]]) -> None:
        self._children: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        nodes = 1
        for tokens, match in paths:
            node = 0
            for i, token in enumerate(tokens):
                below = self._children[node]
                child, longest = below.get(token, (nodes, 0))
                nodes = max(nodes, child + 1)
                below[token] = child, max(longest, min(match + i, _LONGEST))
                node = child
        self._places: dict[int, int] = {0: 0}  # node of the growing tree -> node here

    def join(self, frontier: Frontier, children: Children) -> Children:
        """The candidates of a draft step, joined by those that the text proposes for the same nodes."""
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        proposals: list[tuple[int, dict[int, int]]] = []
        for row, (node, parent, token) in enumerate(steps):
            if node and parent in self._places:
                known = self._children[self._places[parent]].get(token)
                if known is not None:
                    self._places[node] = known[0]
            below = self._children.get(self._places.get(node, -1))
            if below:
                proposals.append((row, {token: match for token, (_, match) in below.items()}))
        return _joined(children, proposals) if proposals else children

    def __len__(self) -> int:
        return len(self._children)


class PromptLookup(Proposer):
    """Proposes the continuations of earlier occurrences of the text's end."""

    name = "prompt lookup"

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def propose(self, text: Sequence[int], depth: int) -> Continuations:
        """What followed earlier occurrences of the text's last tokens."""
        self._index(text)
        paths: list[tuple[Sequence[int], int]] = []
        seen: set[int] = set()
        for length in range(min(_LONGEST, len(text) - 1), 0, -1):
            for place in reversed(self._places.get(tuple(text[-length:]), ())):
                if place < len(text) and place not in seen:
                    seen.add(place)
                    paths.append((text[place : place + depth], length))
        return Continuations(paths)

    def _index(self, text: Sequence[int]) -> None:
        """Update the index to the text, which usually has a few more tokens than last time."""
        known, self._text = self._text, []  # if this is interrupted, everything is indexed again
        if not known or list(text[: len(known)]) != known:
            known = []
            self._places.clear()
        for end in range(len(known) + 1, len(text) + 1):
            for length in range(1, min(_LONGEST, end) + 1):
                places = self._places[tuple(text[end - length : end])]
                places.append(end)
                if len(places) > _MOST_PLACES:
                    del places[0]
        self._text = list(text)


def _joined(children: Children, proposals: list[tuple[int, dict[int, int]]]) -> Children:
    """The candidates with their match lengths, and further columns for what only the text proposes."""
    width, listed = children.tokens.shape
    extra: list[tuple[int, int, int]] = []  # row, token, match
    known = children.proposed
    matches = np.zeros((width, listed), np.int32) if children.matches is None else children.matches.copy()
    for row, proposed in proposals:
        left = dict(proposed)
        for column, token in enumerate(children.tokens[row].tolist()):
            if known[row, column] and token in left:
                matches[row, column] = max(matches[row, column], left.pop(token))
        extra += [(row, token, match) for token, match in sorted(left.items(), key=lambda item: -item[1])]
    columns = max(np.bincount([row for row, _, _ in extra], minlength=1)) if extra else 0
    tokens = np.pad(children.tokens, ((0, 0), (0, columns)))
    logprobs = np.pad(children.logprobs, ((0, 0), (0, columns)), constant_values=-np.inf)
    matches = np.pad(matches, ((0, 0), (0, columns)))
    used = [listed] * width
    for row, token, match in extra:
        tokens[row, used[row]], matches[row, used[row]] = token, match
        used[row] += 1
    return Children(tokens, logprobs, matches)
