"""The sequences in a model drafter's cache: those that are continued, and those that make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.drafters.draft_sequence import DraftSequence
from edgespec.models.llama.cache.kv_cache import (
    KVCache,
    close_all_but,
    common_prefix,
    inherit,
    open_beside,
    open_cache,
)
from edgespec.models.llama.runtime.context import Context
from edgespec.speculation.drafters.base import DraftRequest
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking

_MOST_UNUSED = 16  # rounds after which a text that is not drafted for is forgotten
ROOM = 256  # cells that branches kept from the last tree leave to the next one


class DraftSequences(list[DraftSequence]):
    """The texts in the cache of one context; there is always one.

    Args:
        new_text: makes an empty text of a cache.
    """

    def __init__(self, context: Context, new_text: Callable[[KVCache], DraftSequence]) -> None:
        super().__init__([new_text(open_cache(context, ordered=False))])
        self._context = context
        self._new_text = new_text

    def with_room(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[int]:
        """The requests that the cache has room for; if it has not for all, those with short texts."""
        if len(requests) == 1:
            return [0]
        if self[0].cache.max_paths == 1:
            return []  # a recurrent state is that of one text
        room = self._context.n_cells - 2 * limits.budget  # nodes are read that do not make it into a tree
        served = []
        for index in sorted(range(len(requests)), key=lambda index: len(requests[index].text)):
            room -= len(requests[index].text)
            if room < 0:
                break
            served.append(index)
        return sorted(served)

    def continued(self, wanted: Sequence[tuple[Sequence[int], Ranking | None, int]]) -> list[DraftSequence]:
        """Find for each text the one in the cache that it continues, or open a new one; settle its last tree.

        Args:
            wanted: texts, with how their candidates are ranked and how many of each node are wanted.
        """
        others = list(self)
        found: dict[int, DraftSequence] = {}
        for index, (text, ranking, count) in enumerate(wanted):
            best = max(others, key=lambda known: common_prefix(known.read, text), default=None)
            if best is None:
                break
            if len(wanted) == 1 or best.read == list(text[: len(best.read)]):
                found[index] = best
                others.remove(best)
                best.begin(text)
                alone = len(wanted) == 1 and best.cache.max_paths > 1
                best.keep_accepted(ranking, count, alone=alone, room=self.room_for(best) - ROOM)
        # Sequence ids are needed for texts that are new, so no branches may be left.
        for known in others:
            known.unused += 1
            known.forget_tree()
        self._make_room(others, sum(len(text) for text, _, _ in wanted))
        for index, (text, ranking, count) in enumerate(wanted):
            if index not in found:
                found[index] = self._opened(text)
                found[index].begin(text)
                found[index].keep_accepted(ranking, count)
        return [found[index] for index in range(len(wanted))]

    def room_for(self, text: DraftSequence) -> int:
        """Cells that a text and its branches may take beside what was read of the others."""
        return self._context.n_cells - sum(len(other.read) for other in self if other is not text)

    def close(self, text: DraftSequence) -> None:
        """Forget a text, and give its cells back."""
        text.cache.close()
        self.remove(text)

    def open_empty(self) -> DraftSequence:
        """A new text beside the others.

        Raises:
            ValueError: there is no room for another text.
        """
        text = self._new_text(open_beside(self[0].cache))
        self.append(text)
        return text

    def recover(self) -> None:
        """Return to what was certainly read of each text."""
        close_all_but([text.cache for text in self])
        self[0].cache.recover()
        for text in self:
            text.recover()

    def forget(self) -> None:
        """Forget all texts."""
        for text in self[1:]:
            self.close(text)
        self[0].forget()

    def _make_room(self, others: Sequence[DraftSequence], wanted: int) -> None:
        """Close texts that were not drafted for lately or have no room beside what is wanted."""
        room = self._context.n_cells - wanted
        for text in sorted(others, key=lambda text: text.unused):
            room -= len(text.read)
            if text.unused > _MOST_UNUSED or room < 0:
                self.close(text)

    def _opened(self, text: Sequence[int]) -> DraftSequence:
        """A new text in the cache, which shares the longest beginning that another one has."""
        opened = self._new_text(open_beside(self[0].cache))
        source = max(self, key=lambda known: common_prefix(known.read, text))
        shared = common_prefix(source.read, text[:-1])
        if shared:
            inherit(opened.cache, source.cache, shared)
            opened.read = list(text[:shared])
        self.append(opened)
        return opened
