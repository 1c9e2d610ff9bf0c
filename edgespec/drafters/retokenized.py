"""Drafting with a model of another vocabulary, through text.

The drafter reads the text in its own tokens and continues it. The continuation is tokenized with the
target's vocabulary and drafted as a chain (universal assisted generation: Timor et al. 2025, "Accelerating
LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"). The target
verifies tokens as usual, so the text remains its own. This is slower than a shared vocabulary: every
draft tokenizes twice, and drafts are chains, never trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from edgespec.drafters.window import WHOLE, DraftWindow
from edgespec.models.llama.cache.kv_cache import common_prefix, open_cache
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree

_TAIL = 12  # tokens before the draft that are tokenized with it, because they affect how it is split
_WORST = 1e-4  # probability below which a draft is not worth continuing


class RetokenizedDrafter(Drafter):
    """Drafts chains with a model of another vocabulary.

    Args:
        window: what is read of long sequences.

    Attributes:
        cache: the keys and values of what the drafter has read, including its own draft until the next call.
    """

    def __init__(
        self, model: Model, context: Context, target: Vocabulary, window: DraftWindow = WHOLE
    ) -> None:
        self._window = window
        self.name = f"{model.path.stem} (by text)"
        self._model = model
        self._context = context
        self._own = model.vocabulary
        self._target = target
        self.cache = open_cache(context, ordered=False)
        self._read: list[int] = []
        self._changing = False  # a call has begun and not ended
        self._known: tuple[list[int], bytes] = [], b""  # the target's sequence, and its bytes

    def draft(self, sequence: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A chain of at most `limits.depth` of the target's tokens.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        root = TokenTree.root_only(sequence[-1])
        if not limits.allows_drafting:
            return root
        try:
            so_far = self._follow(sequence).decode()
        except UnicodeDecodeError:
            return root  # the sequence ends inside a character, which the drafter cannot read in part
        depth = min(limits.depth, limits.budget - 1)
        pieces = self._continuation(self._own.tokenize(so_far, control=True, bos=True), depth)
        path = self._cut(sequence, pieces)[:depth]
        floor = limits.min_logprob
        path = list(takewhile(lambda step: not self._target.is_end(step[0]), path))
        path = [(token, score) for token, score in path if score > floor]
        return (
            TokenTree.from_paths(sequence[-1], [([t for t, _ in path], [s for _, s in path])])
            if path
            else root
        )

    def close(self) -> None:
        """Free the context and the weights."""
        self._context.close()
        self._model.close()

    def _follow(self, sequence: Sequence[int]) -> bytes:
        """The sequence's bytes, built up from those of the last call."""
        known, spelled = self._known
        if list(sequence[: len(known)]) != known:
            known, spelled = [], b""
        spelled += b"".join(self._target.piece(token, control=True) for token in sequence[len(known) :])
        self._known = list(sequence), spelled
        return spelled

    def _continuation(self, tokens: list[int], most: int) -> list[tuple[bytes, float]]:
        """The drafter's greedy continuation: the bytes of each token, and the log-probability up to it."""
        if self._changing:  # the last call raised or was interrupted
            self.cache.recover()
            self.cache.rewind(len(self._read))
            del self._read[self.cache.length :]
        self._changing = True
        tokens = self._window.part(tokens, self._window.left_out(len(tokens)))
        shared = min(common_prefix(self._read, tokens), len(tokens) - 1)
        if shared < len(self._read):
            self.cache.rewind(shared)
            del self._read[self.cache.length :]
        pending = tokens[len(self._read) :]
        pieces: list[tuple[bytes, float]] = []
        total = 0.0
        while len(pieces) < most and self.cache.length + len(pending) <= self._context.n_cells:
            logits = self._append(pending)
            token = int(logits.argmax())
            total -= float(np.log(np.exp(logits - logits[token], dtype=np.float64).sum()))
            if self._own.is_end(token) or total < np.log(_WORST):
                break
            pieces.append((self._own.piece(token), total))
            pending = [token]
        self._changing = False
        return pieces

    def _append(self, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Read tokens, and return the logits after the last."""
        step = self._context.n_rows
        for start in range(0, len(tokens), step):
            piece = tokens[start : start + step]
            last = start + step >= len(tokens)
            self.cache.append(TokenBatch.run(piece, len(self._read), 1, "last" if last else "none"))
            self._read.extend(piece)
        row: np.ndarray[tuple[int], np.dtype[np.float32]] = self._context.logits()[-1].copy()
        return row

    def _cut(self, sequence: Sequence[int], pieces: list[tuple[bytes, float]]) -> list[tuple[int, float]]:
        """The draft in the target's tokens, each with the log-probability of the bytes up to its end."""
        drafted = b"".join(data for data, _ in pieces)
        # An unfinished character at the end would be tokenized as a different one.
        drafted = drafted.decode("utf-8", "ignore").encode()
        if not drafted:
            return []
        tail = list(sequence[-_TAIL:])
        before = b"".join(self._target.piece(token, control=True) for token in tail)
        whole = self._target.tokenize((before + drafted).decode("utf-8", "replace"), control=True)
        if whole[: len(tail)] == tail:
            tokens = whole[len(tail) :]
        else:  # tokenized differently than the target wrote it, so without the tail
            tokens = self._target.tokenize(drafted.decode(), control=True)
        ends = np.cumsum([len(data) for data, _ in pieces])
        path, at = [], 0
        for token in tokens:
            at += len(self._target.piece(token, control=True))
            piece = int(np.searchsorted(ends, at))
            path.append((token, pieces[min(piece, len(pieces) - 1)][1]))
        # With more tokens, the last token might have been longer.
        return path[:-1] if len(path) > 1 else path
