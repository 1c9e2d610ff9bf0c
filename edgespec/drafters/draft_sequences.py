"""The sequences in a model drafter's cache: those that are continued, and those that make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgespec.drafters.draft_sequence import WHOLE, DraftSequence, DraftWindow
from edgespec.llama.cache.kv_cache import KVCache, close_all_but, open_beside, open_cache
from edgespec.llama.runtime.context import Context
from edgespec.speculation.drafters.base import DraftMemory
from edgespec.speculation.ranking import Ranking

_MAX_UNUSED = 16  # rounds after which a sequence that is not drafted for is forgotten
ROOM = 256  # cells that branches kept from the last tree leave to the next one


class Wanted(NamedTuple):
    """A sequence that is drafted for, in the drafter's own tokens."""

    tokens: Sequence[int]
    ranking: Ranking | None = None  # how its candidates are ranked; None if tokens are drawn
    branching: int = 0  # how many candidates of each node are wanted
    # whose state is its part of the cache; None to look for one that begins alike
    memory: DraftMemory | None = None


class DraftSequences(list[DraftSequence]):
    """The sequences in the cache of one context; there is always one.

    Args:
        new_sequence: makes an empty sequence of a cache.
        window: what is read of long sequences.
    """

    def __init__(
        self,
        context: Context,
        new_sequence: Callable[[KVCache], DraftSequence],
        window: DraftWindow = WHOLE,
    ) -> None:
        super().__init__([new_sequence(open_cache(context, ordered=False))])
        self._context = context
        self._new_sequence = new_sequence
        self._window = window

    def with_room(self, lengths: Sequence[int], nodes: int) -> list[int]:
        """The sequences that the cache has room for; if it has not for all, short ones.

        Args:
            lengths: of the sequences.
            nodes: of all trees together.
        """
        if len(lengths) > 1 and self._context.n_sequences == 1:
            return []  # a recurrent state is that of one sequence
        room = self._context.n_cells - 2 * nodes  # some are read that do not make it into a tree
        served: list[int] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            room -= self._window.length_read(lengths[index])
            if room < 0 or len(served) == self._context.n_sequences:
                break
            served.append(index)
        return sorted(served)

    def continued(self, wanted: Sequence[Wanted]) -> list[DraftSequence]:
        """Find the cached sequence that each sequence continues, or open a new one; settle its last tree."""
        others = list(self)
        found: dict[int, DraftSequence] = {}
        kept = [one.memory.state for one in wanted if one.memory is not None]
        for index, (sequence, ranking, count, memory) in enumerate(wanted):
            best = memory.state if memory is not None else None
            if (
                not isinstance(best, DraftSequence)
                or best not in others
                or not best.is_continued_by(sequence)
            ):
                # The first tree of a sequence: whatever was read of one that begins alike is of use.
                free = [known for known in others if known not in kept] if len(wanted) > 1 else others
                best = max(free, key=lambda known: known.agreement(sequence), default=None)
            if best is None:
                continue
            if len(wanted) == 1 or best.is_continued_by(sequence):
                found[index] = best
                others.remove(best)
                best.begin(sequence)
                alone = len(wanted) == 1 and best.cache.max_paths > 1
                best.keep_accepted(ranking, count, alone=alone, room=self.room_for(best) - ROOM)
        # Sequence ids are needed for sequences that are new, so no branches may be left.
        for known in others:
            known.unused += 1
            known.forget_tree()
        empty = self._make_room(others, [self._window.length_read(len(one.tokens)) for one in wanted])
        for index, (sequence, ranking, count, memory) in enumerate(wanted):
            if index not in found:
                found[index] = self._opened(sequence, empty)
                found[index].begin(sequence)
                found[index].keep_accepted(ranking, count)
            if memory is not None:
                memory.state = found[index]
        return [found[index] for index in range(len(wanted))]

    def room_for(self, sequence: DraftSequence) -> int:
        """Cells that a sequence and its branches may take beside what was read of the others."""
        return self._context.n_cells - sum(len(other.read) for other in self if other is not sequence)

    def close(self, sequence: DraftSequence) -> None:
        """Forget a sequence, and give its cells back."""
        sequence.cache.close()
        self.remove(sequence)

    def open_empty(self) -> DraftSequence:
        """A new sequence beside the others.

        Raises:
            ValueError: there is no room for another sequence.
        """
        sequence = self._new_sequence(open_beside(self[0].cache))
        self.append(sequence)
        return sequence

    def recover(self) -> None:
        """Return to what was certainly read of each sequence."""
        close_all_but([sequence.cache for sequence in self])
        self[0].cache.recover()
        for sequence in self:
            sequence.recover()

    def forget(self) -> None:
        for sequence in self[1:]:
            self.close(sequence)
        self[0].forget()

    def _make_room(self, others: Sequence[DraftSequence], wanted: Sequence[int]) -> list[DraftSequence]:
        """Close sequences that were not drafted for lately or have no room beside those that are wanted.

        Args:
            wanted: their lengths.

        Returns:
            The last sequence if it should have been closed, too; it is empty now.
        """
        room = self._context.n_cells - sum(wanted)
        ids = self._context.n_sequences - 2 * len(wanted)  # each has its own, and one for a branch
        empty = []
        for kept, sequence in enumerate(sorted(others, key=lambda sequence: sequence.unused)):
            room -= len(sequence.read)
            if sequence.unused <= _MAX_UNUSED and room >= 0 and kept < ids:
                continue
            if len(self) > 1:
                self.close(sequence)
            else:
                sequence.forget()
                empty.append(sequence)
        return empty

    def _opened(self, sequence: Sequence[int], empty: list[DraftSequence]) -> DraftSequence:
        """A new sequence in the cache, which shares the longest beginning that another one has."""
        opened = empty.pop() if empty else self.open_empty()
        opened.share(max(self, key=lambda known: known.agreement(sequence)), sequence)
        return opened
