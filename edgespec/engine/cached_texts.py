"""The texts in the target's cache: opened and closed, saved to disk and restored, cut and settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.engine.hidden_states import HiddenFeed
from edgespec.engine.passes import CachedText
from edgespec.models.llama.cache.states import StateStore
from edgespec.models.llama.cache.text_cache import (
    TextCache,
    close_all_but,
    common_prefix,
    inherit,
    open_beside,
    open_cache,
)
from edgespec.models.llama.runtime.context import Context


class CachedTexts:
    """The texts whose keys and values are in one context.

    Every call is atomic as far as later calls can tell: whatever it raises and wherever it is interrupted,
    the next call first discards what it left in the cache. The cached texts may then be shorter than before,
    and the missing parts are read again; they are never different texts.

    There is always one text, the target's own, for callers that have a single one. Others are opened beside
    it, and share its cells.

    Args:
        ordered: rows take cells in the order of decoding, for exact decoding.

    Attributes:
        max_leaves: most leaves of a tree.
        max_texts: most texts in the cache.
        identity: everything that the contents of the cache depend on, except the tokens.
        stores: where the states of texts are kept on disk.
    """

    def __init__(self, context: Context, *, ordered: bool) -> None:
        self.own = CachedText(open_cache(context, ordered=ordered))
        self.max_leaves = self.cache.max_paths
        # Saving a text's state takes an id of its own; a running state is that of one text.
        self.max_texts = max(self.max_leaves - 1, 1) if self.cache.saves_parts else 1
        self.identity: dict[str, str] = {}
        self.stores: list[StateStore] = []
        self._texts = [self.own]
        self._hidden = HiddenFeed()
        self._changing = False  # a call has begun and not ended
        self._guessing = False  # trees were verified, but nothing of them is committed yet

    @property
    def cache(self) -> TextCache:
        """The cache of the target's own text."""
        return self.own.cache

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the target's own text whose keys and values are in the cache."""
        if self._changing:
            self._recover()
        return self.own.tokens

    @property
    def texts(self) -> Sequence[CachedText]:
        """All texts in the cache, the target's own first."""
        if self._changing:
            self._recover()
        return self._texts

    @property
    def n_free_leaves(self) -> int:
        """Leaves that trees of all texts together may have beyond one for each."""
        return self.cache.n_free_ids

    @property
    def n_live(self) -> int:
        """Cells that texts hold."""
        return self.cache.n_live

    def open_text(self, tokens: Sequence[int]) -> CachedText:
        """A new text in the cache, which holds as much of the beginning of `tokens` as is known already.

        The cells of the longest beginning that another text has in common are shared. A recurrent state is
        that of a single text, so there this is the target's own.

        Raises:
            ValueError: there are `max_texts` texts already.
        """
        if self.max_texts == 1:
            self.recall(tokens)
            return self.own
        self._begin()
        cached = CachedText(open_beside(self.cache))
        self._texts.append(cached)
        source, shared = self.longest_prefix(tokens, but=cached)
        if source is not None:
            inherit(cached.cache, source.cache, shared)
            cached.tokens[:] = tokens[:shared]
        self._changing = False
        return cached

    def close_text(self, cached: CachedText) -> None:
        """Forget a text that was opened; the target's own stays."""
        if cached is self.own:
            return
        self._begin()
        cached.tokens.clear()
        cached.cache.close()
        self._texts.remove(cached)
        self._changing = False
        self._hidden.closed(cached)

    def longest_prefix(
        self, tokens: Sequence[int], but: CachedText | None = None
    ) -> tuple[CachedText | None, int]:
        """The text in the cache with the longest beginning of `tokens`, but for one, and its length."""
        longest: tuple[CachedText | None, int] = (None, 0)
        for other in self._texts:
            length = 0 if other is but else common_prefix(other.tokens, tokens)
            if length > longest[1]:
                longest = other, length
        return longest

    def recall(
        self, tokens: Sequence[int], cached: CachedText | None = None, stores: Sequence[StateStore] = ()
    ) -> int:
        """Make the cache hold as long a prefix of `tokens` as possible without a pass.

        Args:
            cached: the text that shall hold it; None for the target's own.
            stores: where else to look for saved states.

        Returns:
            How many tokens it now holds.
        """
        cached = cached or self.own
        self._begin()
        cached.rewind(common_prefix(cached.tokens, tokens))
        _drop_pending(cached)
        for store in [*self.stores, *stores]:
            cached.tokens[:] = tokens[: store.restore(cached.cache, tokens)]
        self._changing = False
        return cached.cache.length

    def save_text(self, store: StateStore, cached: CachedText) -> None:
        """Write the state of a whole text to a store."""
        self._begin()
        _drop_pending(cached)
        store.keep(cached.cache, cached.tokens, tail=True)
        self._changing = False

    def keep(self, store: StateStore, text: Sequence[int]) -> int:
        """Make a store hold the state of as much of a text as is in the cache, and of no other text.

        Args:
            text: the target's own.

        Returns:
            How many tokens that is. 0 if the cache holds nothing of the text, or if a recurrent state has
            already moved past it; the store is then left unchanged.
        """
        self._begin()
        _drop_pending(self.own)
        held = self.own.tokens
        known = common_prefix(held, text)
        if not self.cache.saves_parts and known < self.cache.length:
            known = 0
        if known or not text:
            store.keep(self.cache, held[:known], tail=True)
            store.prune(held[:known], parts=self.cache.saves_parts)
        self._changing = False
        return known

    def store_blocks(self, cached: CachedText) -> None:
        """Write the whole blocks of a text that are not on disk yet to the stores."""
        for store in self.stores:
            store.keep(cached.cache, cached.tokens, tail=False)

    def storing(self, cached: CachedText) -> Iterator[None]:
        """Write what is not on disk yet of a text to the stores, with a step for each block.

        The steps end early when the cache no longer has the text as it is now.
        """
        return self._storing(cached, list(cached.tokens))

    def _storing(self, cached: CachedText, text: list[int]) -> Iterator[None]:
        for store in self.stores:
            blocks = store.keeping(cached.cache, text, tail=True)
            while cached.tokens == text:
                self._begin()
                wrote = next(blocks, self) is not self
                self._changing = False
                if not wrote:
                    break
                yield

    def rewind(self, length: int) -> None:
        """Forget the target's own text from `length` on."""
        self._begin()
        self.own.rewind(length)
        self._changing = False

    def settle(self, length: int, cached: CachedText | None = None) -> None:
        """End an answer: forget what plain decoding would not have read by its end."""
        cached = cached or self.own
        self._begin()
        cached.cache.settle(length)
        del cached.tokens[cached.cache.length :]
        self._changing = False

    @property
    def n_pending(self) -> int:
        """Rows of the next pass that tokens of its text take, besides the root of the tree."""
        return self.cache.n_pending

    def _begin(self) -> None:
        """Begin a call that changes the cache, and discard what an interrupted one left behind."""
        if self._changing or self._guessing:
            self._recover()
        self._changing = True

    def _recover(self) -> None:
        """Reset cache and tokens to what both are known to hold."""
        self._changing = True  # in case this is interrupted too
        close_all_but([cached.cache for cached in self._texts])
        self.cache.recover()
        for cached in self._texts:
            cached.rewind(len(cached.tokens))
        self._changing = self._guessing = False


def _drop_pending(cached: CachedText) -> None:
    """Forget the tokens that only the next pass would read; they are read like any others then."""
    cached.rewind(cached.cache.length - cached.cache.n_pending)
