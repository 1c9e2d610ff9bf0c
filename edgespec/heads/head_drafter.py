"""The head drafter: a single layer that reads the target's hidden states grows trees.

It is an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), or the target's own layer for multi-token prediction
(MTP). The target shows the hidden states of everything that joins a sequence. They are
encoded to features soon after, and dropped; a feature is dropped when the head has read it. Trees grow by the
same search as those of models. All of it concerns drafts alone: the sequence is the target's own in any case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgespec.drafters.draft_sequence import DraftSequence, DraftStep
from edgespec.drafters.draft_sequences import Wanted
from edgespec.drafters.model import ModelDrafter
from edgespec.files.checked import CheckedFiles
from edgespec.heads.head_context import HeadContext
from edgespec.heads.head_sequence import HeadSequence
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.cache.states import StateStore
from edgespec.llama.runtime.model import Model
from edgespec.speculation.drafters.base import DraftMemory, DraftRequest
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.sampled_trees import Drawing
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

_MAX_WAITING = 2048  # rows of hidden states that nobody has asked to digest; then they are dropped
_SPARE_CELLS = 256  # for the trees of all sequences
_TRIAL_TEXT = 16  # least tokens before the rows that are timed


class TargetSequence(Protocol):
    """A sequence of the target: its tokens, its place in the cache, and what drafters keep of it."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def cache(self) -> KVCache | None: ...
    @property
    def memory(self) -> DraftMemory: ...


@dataclass(frozen=True)
class _ShownStates:
    """Hidden states (rows, width) of the last tokens of a sequence in the target's cache, from `start` on."""

    memory: DraftMemory
    tokens: list[int]
    start: int
    hidden: FloatArray


class HeadDrafter(ModelDrafter):
    """Drafts with a head, for one sequence or for several at once; a `HiddenReader` of its target.

    A sequence is drafted for once the features of all of its tokens but the last are known. Until then, as
    after a conversation was restored from disk, its tree is the root alone.

    Args:
        proposers: sources whose candidates are merged into the tree.
        name: of a head that is part of the target, whose weights are closed with the target; None for one in
            a file of its own.
    """

    reads_target = True
    keeps_branches = False  # the features of what was drafted are not those of the sequence
    may_rest = False  # it is cheap, and has to follow the sequence

    def __init__(
        self,
        model: Model,
        context: HeadContext,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
        *,
        name: str | None = None,
    ) -> None:
        self._head = context
        self._owns_model = name is None
        super().__init__(model, context, target_vocabulary, proposers, name=name)
        self._shown: list[_ShownStates] = []
        self._closed: list[DraftMemory] = []
        self._owned: dict[DraftMemory, HeadSequence] = {}

    def _new_sequence(self, cache: KVCache) -> HeadSequence:
        return HeadSequence(cache, self._n_vocab, self._head.width)

    def receive(self, sequence: TargetSequence, start: int, hidden: FloatArray) -> None:
        """Tokens of a sequence were read by the target; see HiddenReader."""
        if sum(len(shown.hidden) for shown in self._shown) > _MAX_WAITING:
            self._shown.clear()  # sequences that are never drafted for: they begin anew where they are
        tokens = list(sequence.tokens[: start + len(hidden)])
        self._shown.append(_ShownStates(sequence.memory, tokens, start, hidden))

    def closed(self, sequence: TargetSequence) -> None:
        self._shown = [shown for shown in self._shown if shown.memory is not sequence.memory]
        self._closed.append(sequence.memory)

    def digest(self) -> None:
        """Encode the hidden states that were taken, and read all that can be read except a last step's rows.

        Raises:
            DecodeAborted: stopped from outside; the rest is done later.
        """
        if self._shown or self._closed:
            self._begin()
            self._digest()
            self._changing = False

    def draw(self, sequence: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree of tokens sampled from the head's distribution, if the sequence's features are known."""
        self.digest()
        if self._ready(sequence) is None:
            return DraftedTree(TokenTree.root_only(sequence[-1]))
        return super().draw(sequence, drawing, width)

    def step_seconds(self, rows: int) -> float:
        """Seconds of one decode of this many rows, after a short sequence; everything is forgotten."""
        self.forget()
        sequence, rng = self._sequences[0], np.random.default_rng(rows)
        assert isinstance(sequence, HeadSequence)
        n_tokens = rows + -(-_TRIAL_TEXT // rows) * rows
        tokens = rng.integers(0, self._n_vocab, n_tokens + 1).tolist()
        self._begin()
        sequence.add_features(
            tokens, 0, rng.standard_normal((n_tokens + 1, self._head.width)).astype(np.float32)
        )
        sequence.prepare_reading()
        sequence.read_pending(rows)
        start = time.perf_counter()
        sequence.cache.append(sequence.pending_batch())
        self._context.logits()
        seconds = time.perf_counter() - start
        self.forget()
        return seconds

    def close(self) -> None:
        """Free the context, and the weights if they are not the target's."""
        if self._owns_model:
            super().close()
        else:
            self._context.close()

    def forget(self) -> None:
        """Forget everything that was read or shown."""
        super().forget()
        self._shown, self._closed, self._owned = [], [], {}

    def recall(self, sequence: Sequence[int], folder: Path) -> None:
        """Restore nothing, as in `save`."""

    def save(self, sequence: Sequence[int], folder: Path) -> None:
        """Save nothing: a cache is of no use without the features that belong to it."""

    def keep_prompts(self, files: CheckedFiles) -> None:
        """Keep nothing, as in `save`."""

    def _digest(self) -> None:
        for memory in self._closed:
            self._release(memory)
        self._closed = []
        while self._shown:
            shown = self._shown[0]
            features = self._head.encode(shown.hidden)
            sequence = self._sequence_of(shown.memory)
            if sequence is not None:
                if not sequence.n_rows and shown.start:
                    self._begin_like_another(sequence, shown)
                sequence.add_features(shown.tokens, shown.start, features)
            del self._shown[0]
            if sequence is not None and sequence.readable > self._context.n_rows:
                self._read_ahead(sequence)

    def _begin_like_another(self, sequence: HeadSequence, shown: _ShownStates) -> None:
        """Let an empty sequence share the rows of one that begins alike, as it does in the target's cache."""
        start = shown.start
        alike = [
            other
            for other in self._owned.values()
            if start >= other.unread and other.known_sequence[:start] == shown.tokens[:start]
        ]
        if alike:
            sequence.begin_like(min(alike, key=lambda other: other.unread), start)

    def _read_ahead(self, sequence: HeadSequence) -> None:
        """Read rows of a long sequence, so that their features need not be kept."""
        room = self._context.n_cells - _SPARE_CELLS - sequence.n_rows
        if room < 0:
            sequence.forget()
            return
        self._leave(room, [sequence])
        sequence.prepare_reading()
        sequence.read_pending(self._context.n_rows)
        sequence.pending = []

    def _leave(self, room: int, kept: Sequence[DraftSequence]) -> None:
        """Forget all sequences but these, if the others have more rows than there is room for."""
        others = [sequence for sequence in self._sequences if all(sequence is not one for one in kept)]
        if sum(len(sequence.read) for sequence in others) > room:
            for sequence in others:
                sequence.forget()

    def _sequence_of(self, memory: DraftMemory) -> HeadSequence | None:
        """The sequence in the head's cache for one of the target's; None if there is no room for another."""
        if memory in self._owned:
            return self._owned[memory]
        used = list(map(id, self._owned.values()))
        free = [sequence for sequence in self._sequences if id(sequence) not in used]
        found = free[0] if free else self._opened_beside()
        if found is None:
            return None
        assert isinstance(found, HeadSequence)
        self._owned[memory] = found
        return found

    def _opened_beside(self) -> DraftSequence | None:
        for sequence in self._sequences:
            sequence.forget_tree()  # its branches may have all sequence ids
        try:
            return self._sequences.open_empty()
        except ValueError:
            return None

    def _release(self, memory: DraftMemory) -> None:
        sequence = self._owned.pop(memory, None)
        if sequence is None:
            return
        if sequence is self._sequences[0]:
            sequence.forget()
        else:
            sequence.forget_tree()
            self._sequences.close(sequence)

    def _ready(self, tokens: Sequence[int], memory: DraftMemory | None = None) -> HeadSequence | None:
        """The sequence in the head's cache whose features are known up to the root; None if there is none."""
        known = list(self._owned.values()) if memory is None else [self._owned.get(memory)]
        before = list(tokens[:-1])
        fits = (one for one in known if one is not None and one.n_rows and one.known_sequence == before)
        return next(fits, None)

    def _with_room(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[int]:
        """The requests whose sequences are ready, as far as the cache has room for them."""
        self._digest()
        ready = {
            index: sequence
            for index, request in enumerate(requests)
            if (sequence := self._ready(request.sequence, request.memory)) is not None
        }
        room = self._context.n_cells - 2 * limits.budget  # nodes are read that do not make it into a tree
        served: list[int] = []
        for index in sorted(ready, key=lambda index: ready[index].n_rows)[: self._context.n_rows]:
            if ready[index].n_rows > room:
                break
            room -= ready[index].n_rows
            served.append(index)
        self._leave(room, [ready[index] for index in served])
        return sorted(served)

    def _sequences_for(self, wanted: Sequence[Wanted]) -> list[DraftSequence]:
        """The sequence in the cache for each of these, which are ready; its last tree is dropped."""
        for known in self._sequences:
            known.forget_tree()
        found: list[DraftSequence] = []
        for tokens, ranking, count, memory in wanted:
            sequence = self._ready(tokens, memory)
            assert sequence is not None, "only sequences that are ready are drafted for"
            sequence.begin(tokens)
            sequence.keep_accepted(ranking, count)
            found.append(sequence)
        return found

    def _recall(self, drafted: DraftSequence, sequence: Sequence[int], store: StateStore | None) -> None:
        """Recall nothing: no state is saved."""

    def _max_pending(self, steps: Sequence[DraftStep]) -> int:
        branches = sum(len(step.frontier.nodes) for step in steps if not step.reads_sequence)
        sequences = sum(step.reads_sequence for step in steps)
        return max((self._context.n_rows - branches) // max(sequences, 1), 1)

    def _was_read(self, steps: Sequence[DraftStep], rows: Sequence[slice]) -> None:
        outputs = sum(step.n_outputs for step in steps)
        if not outputs:
            return
        features = self._head.features(outputs)
        for step, which in zip(steps, rows, strict=True):
            assert isinstance(step.sequence, HeadSequence)
            step.sequence.keep_features(step.frontier, step.rows, features[which])
