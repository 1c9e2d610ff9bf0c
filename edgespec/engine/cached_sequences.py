"""The sequences in the target's cache: opened and closed, cut, saved to disk and restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec.engine.sequence import TextSequence
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.kv_cache import KVCache, close_all_but, common_prefix, inherit, open_beside
from edgespec.llama.cache.states import StateFile, StateStore


class CachedSequences:
    """The sequences in a cache.

    Every call is atomic as far as later calls can tell: whatever it raises and wherever it is interrupted,
    the next call first discards what it left in the cache. The cached sequences may then be shorter than
    before, and the missing parts are read again; they are never different sequences.

    There is always one sequence, the target's own: that of callers who have a single one, or of the last of
    them. Others are opened beside it, and share its cells.

    Args:
        cache: where the target's own sequence is to be.

    Attributes:
        max_leaves: most leaves of a tree.
        max_sequences: most sequences in the cache.
        identity: everything that the contents of the cache depend on, except the tokens.
        stores: where the states of all sequences are kept on disk.
    """

    def __init__(self, cache: KVCache) -> None:
        self._sequences = [TextSequence([], cache=cache)]
        self.max_leaves = cache.max_paths
        # Saving a sequence's state takes an id of its own; a running state is that of one sequence.
        self.max_sequences = max(self.max_leaves - 1, 1) if cache.saves_parts else 1
        self.identity: dict[str, str] = {}
        self.stores: list[StateStore] = []
        self._changing = False  # a call has begun and not ended
        self._guessing = False  # trees were verified, but nothing of them is committed yet

    @property
    def own(self) -> TextSequence:
        """The target's own sequence."""
        return self._sequences[0]

    @property
    def cache(self) -> KVCache:
        """The cache of the target's own sequence."""
        return self.own.kv_cache

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the target's own sequence whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self.own.cached

    @property
    def sequences(self) -> Sequence[TextSequence]:
        """All sequences in the cache, the target's own first."""
        if self._changing:
            self._recover()
        return self._sequences

    @property
    def n_free_leaves(self) -> int:
        """Leaves that trees of all sequences together may have beyond one for each."""
        return self.cache.n_free_ids

    @property
    def n_live(self) -> int:
        """Cells that sequences hold."""
        return self.cache.n_live

    def open_sequence(self, sequence: TextSequence) -> None:
        """Give a sequence a place in the cache, with as much of its beginning as is known already.

        The cells of the longest beginning that another sequence has in common are shared. A recurrent state
        is that of a single sequence, so there it becomes the target's own.

        Raises:
            ValueError: there are `max_sequences` sequences already.
        """
        if self.max_sequences == 1:
            length = len(sequence.tokens) - 1
            self._make_own(sequence)
            self.recall(sequence, length if sequence.scores is None else sequence.scores.covered)
            return
        self._begin()
        source, shared = self.longest_prefix(sequence)
        sequence.cache = open_beside(self.cache)
        sequence.cache.positions = sequence.positions
        self._sequences.append(sequence)
        if source is not None:
            inherit(sequence.kv_cache, source.kv_cache, shared)
            if sequence.scores is not None:
                sequence.scores.inherit(source.scores, shared)
        self._changing = False

    def _make_own(self, sequence: TextSequence) -> None:
        """Give a sequence the place of the target's own, with what that has of its beginning."""
        old = self.own
        if sequence is old:
            return
        self._begin()
        shared = sequence.shared_with(old)
        if sequence.scores is not None:
            sequence.scores.inherit(old.scores, shared)
        old.rewind(shared)
        sequence.cache, sequence.memory = old.cache, old.memory
        sequence.kv_cache.positions = sequence.positions
        self._sequences[0] = sequence
        old.cache = None
        self._changing = False

    def close_sequence(self, sequence: TextSequence) -> None:
        """Forget a sequence that was opened; the target's own stays."""
        if sequence is self.own:
            return
        self._begin()
        sequence.kv_cache.close()
        self._sequences.remove(sequence)
        self._changing = False
        sequence.cache = None

    def longest_prefix(self, sequence: TextSequence) -> tuple[TextSequence | None, int]:
        """Another sequence in the cache that has most of the beginning of one, and how much that is.

        If the prompt is scored, the scores of that beginning must be known.
        """
        longest: tuple[TextSequence | None, int] = (None, 0)
        for other in self._sequences:
            length = 0 if other is sequence else sequence.shared_with(other)
            if length > longest[1]:
                longest = other, length
        return longest

    def recall(self, sequence: TextSequence, length: int | None = None) -> int:
        """Make the cache hold as much of a sequence as possible without a pass.

        Args:
            sequence: becomes the target's own, if it has no place in the cache.
            length: most tokens of it; None for all but the last.

        Returns:
            How many tokens of it the cache now holds.
        """
        if sequence.cache is None:
            self._make_own(sequence)
        self._begin()
        wanted = sequence.tokens[: len(sequence.tokens) - 1 if length is None else length]
        sequence.rewind(sequence.between_images(min(sequence.n_cached, len(wanted))))
        _drop_pending(sequence)
        for saved in (*self.stores, sequence.store, sequence.state):
            if saved is not None:
                saved.restore(sequence.kv_cache, wanted)
        sequence.forget_part_of_image()
        self._changing = False
        return sequence.n_cached

    def set_aside(self, sequence: TextSequence, folder: Path) -> None:
        """Move what the cache holds of a sequence that was opened to a file; `recall` moves it back.

        Args:
            folder: on the disk that is to hold the file.
        """
        self._begin()
        _drop_pending(sequence)
        sequence.forget_part_of_image()
        sequence.state = StateFile(folder, sequence.kv_cache, sequence.cached)
        self._changing = False
        self.close_sequence(sequence)

    def save_state(self, store: StateStore, tokens: Sequence[int]) -> int:
        """Make a store hold the state of as much of a sequence as is in the cache, and of no other sequence.

        Args:
            tokens: of the target's own sequence.

        Returns:
            How many tokens that is. 0 if the cache holds nothing of the sequence, or if a recurrent state has
            already moved past it; the store is then left unchanged.
        """
        self._begin()
        _drop_pending(self.own)
        held = self.own.cached
        known = common_prefix(held, tokens)
        if not self.cache.saves_parts and known < self.cache.length:
            known = 0
        if known:
            store.save(self.cache, held[:known], tail=True)
            store.prune(held[:known], parts=self.cache.saves_parts)
        self._changing = False
        return known

    def store_in(self, files: CheckedFiles) -> StateStore:
        """A store of states of this target's sequences."""
        return StateStore(files, repr(sorted(self.identity.items())))

    def _store_blocks(self, sequence: TextSequence) -> None:
        """Write the whole blocks of a sequence that are not on disk yet."""
        for place in (*self.stores, sequence.store):
            if place is not None:
                place.save(sequence.kv_cache, sequence.cached, tail=False)

    def storing(self, sequence: TextSequence) -> Iterator[None]:
        """Write what is not on disk yet of a sequence to the stores, with a step for each block.

        The steps end early when the cache no longer has the sequence as it is now.
        """
        return self._storing(sequence.kv_cache, sequence, sequence.cached)

    def _storing(self, cache: KVCache, sequence: TextSequence, tokens: list[int]) -> Iterator[None]:
        for store in self.stores:
            blocks = store.saving(cache, tokens, tail=True)
            while sequence.cache is cache and sequence.cached == tokens:
                self._begin()
                wrote = next(blocks, self) is not self
                self._changing = False
                if not wrote:
                    break
                yield

    def rewind(self, length: int) -> None:
        """Forget the target's own sequence from `length` on."""
        self._begin()
        self.own.rewind(length)
        self._changing = False

    def truncate_to(self, sequence: TextSequence, length: int) -> None:
        """End an answer: forget what plain decoding would not have read by its end."""
        self._begin()
        sequence.kv_cache.truncate_to(length)
        self._changing = False

    @property
    def n_pending(self) -> int:
        """Rows of the next pass that tokens of its sequence take, besides the root of the tree."""
        return self.cache.n_pending

    def _begin(self) -> None:
        """Begin a call that changes the cache, and discard what an interrupted one left behind."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Reset cache and tokens to what both are known to hold."""
        self._changing = True  # in case this is interrupted too
        close_all_but([sequence.kv_cache for sequence in self._sequences])
        self.cache.recover()
        self._changing = self._guessing = False


def _drop_pending(sequence: TextSequence) -> None:
    """Forget the tokens that only the next pass would read; they are read like any others then."""
    sequence.rewind(sequence.kv_cache.length - sequence.kv_cache.n_pending)
