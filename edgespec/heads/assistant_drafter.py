"""The assistant drafter: a small model that looks at its target's keys and values grows trees.

An assistant (Gemma 4's) reads a token beside the feature of the token before it, and sees the sequence as the
target has cached it. It caches nothing, and no row sees another one: each depends on its token, on its
parent's feature and on the sequence. So trees need no branches, a rejection leaves nothing to be undone, and
of everything that the target shows, the last state of each sequence is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.heads.assistant import AssistantContext
from edgespec.heads.head_context import HEAD_ROWS
from edgespec.heads.head_drafter import TargetSequence
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.context import NoRoomInCache
from edgespec.llama.runtime.model import Model
from edgespec.speculation.drafters.base import DraftMemory, DraftRequest, ProposedBy
from edgespec.speculation.drafters.candidates import TreeCandidates
from edgespec.speculation.drafters.merging import MergingDrafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.tree_search import TreeSearch, grow_together
from edgespec.speculation.verification.base import DraftedTree


@dataclass(frozen=True)
class _ShownState:
    """The last state (width,) that the target has shown of a sequence, and the sequence up to its token."""

    memory: DraftMemory
    kv_cache: KVCache  # the cells of the sequence in the target's cache
    tokens: list[int]
    state: FloatArray


class GrowingTree:
    """A tree that is drafted below a sequence.

    Args:
        sequence_id: the target's, of the sequence.
        state: (width,) of the token before the root.
    """

    def __init__(self, sequence_id: int, state: FloatArray, candidates: TreeCandidates) -> None:
        self.root_position = len(candidates.text) - 1
        self.sequence_id = sequence_id
        self.candidates = candidates
        self._features = {-1: state}  # the root has the parent -1

    def features_before(self, frontier: Frontier) -> FloatArray:
        """(nodes, width) the features of the parents of nodes."""
        return np.stack([self._features[parent] for parent in frontier.parents.tolist()])

    def record(self, frontier: Frontier, features: FloatArray) -> None:
        """Record what was computed of nodes, (nodes, width), for their children."""
        for node, feature in zip(frontier.nodes.tolist(), features, strict=True):
            self._features[node] = feature

    def expand(self, frontier: Frontier, logits: FloatArray) -> Children:
        """The candidates after each node, with those of the proposers.

        Args:
            logits: (nodes, n_vocab).
        """
        ranked = self.candidates.ranked(frontier, range(len(frontier.nodes)), logits)
        return self.candidates.joined(frontier, ranked)


class AssistantDrafter(MergingDrafter):
    """Drafts with an assistant, for one sequence or for several at once; a `HiddenReader` of its target.

    A sequence is drafted for once the target has shown the state of its last token but one. Until then, as
    after a conversation was restored from disk, its tree is the root alone.

    Args:
        proposers: sources whose candidates are merged into the tree.
    """

    reads_target = True

    def __init__(
        self,
        model: Model,
        context: AssistantContext,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
    ) -> None:
        self._n_vocab = min(model.vocabulary.n_tokens, target_vocabulary)
        super().__init__(proposers, model.path.stem, self._n_vocab)
        self._model = model
        self._context = context
        self._shown: list[_ShownState] = []
        self._drafted: dict[int, GrowingTree] = {}  # by the places of their requests

    def receive(self, sequence: TargetSequence, start: int, hidden: FloatArray) -> None:
        """Tokens of a sequence were read by the target; see HiddenReader."""
        assert sequence.cache is not None
        self.closed(sequence)
        tokens = list(sequence.tokens[: start + len(hidden)])
        self._shown.append(_ShownState(sequence.memory, sequence.cache, tokens, hidden[-1].copy()))

    def closed(self, sequence: TargetSequence) -> None:
        self._shown = [shown for shown in self._shown if shown.memory is not sequence.memory]

    def digest(self) -> None:
        """Nothing to do: states are read as they are, when they are needed."""

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several sequences, from one search.

        Sequences whose last state is not known get trees of their roots only, and all sequences where the
        target's cache has no room for the rows of a draft step: the target makes room in its next pass.

        Raises:
            DecodeAborted: stopped from outside.
        """
        self._begin()
        trees = [TokenTree.root_only(request.sequence[-1]) for request in requests]
        drafted: dict[int, GrowingTree] = {}
        for index, request in enumerate(requests if limits.allows_drafting else ()):
            proposals = request.proposals(self._proposers)
            candidates = TreeCandidates(request.sequence, request.limits, request.ranking, proposals)
            growing = self._below(candidates, request.memory)
            if growing is not None:
                drafted[index] = growing
        if not drafted:
            return trees
        growing_trees = list(drafted.values())
        if len(requests) > 1:
            limits = replace(limits, width=HEAD_ROWS)
        searches = [TreeSearch(requests[index].sequence[-1], requests[index].limits) for index in drafted]

        def expand(frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
            steps = [(growing_trees[place], frontier) for place, frontier in frontiers]
            return [
                growing.expand(frontier, logits)
                for (growing, frontier), logits in zip(steps, self._read(steps), strict=True)
            ]

        try:
            grown = grow_together(searches, expand, limits)
        except NoRoomInCache:
            return trees
        for index, tree in zip(drafted, grown, strict=True):
            trees[index] = tree
        self._drafted = drafted
        return trees

    def draw(self, sequence: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree whose tokens are sampled from the assistant's distribution, if the last state is known.

        Raises:
            DecodeAborted: stopped from outside.
        """
        self._begin()
        growing = self._below(TreeCandidates(sequence))

        def read(frontier: Frontier) -> tuple[list[int], FloatArray]:
            assert growing is not None
            (logits,) = self._read([(growing, frontier)])
            return list(range(len(frontier.nodes))), logits

        if growing is not None:
            try:
                return grow_drawn(sequence[-1], read, drawing, width)
            except NoRoomInCache:
                pass
        return DraftedTree(TokenTree.root_only(sequence[-1]))

    def step_seconds(self, rows: int) -> float:
        """Seconds of one decode of this many rows, behind what the target has cached of its first sequence.

        Args:
            rows: at most HEAD_ROWS.

        Raises:
            DecodeAborted: stopped from outside.
        """
        rng = np.random.default_rng(rows)
        tokens = rng.integers(0, self._n_vocab, rows).tolist()
        features = rng.standard_normal((rows, self._context.width)).astype(np.float32)
        behind = self._context.last_position(0) + 1
        start = time.perf_counter()
        self._context.draft(tokens, [behind] * rows, [0] * rows, features)
        return time.perf_counter() - start

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of the last tree."""
        growing = self._drafted.get(index)
        return super().proposed_by(tree, index) if growing is None else growing.candidates.proposed_by(tree)

    def learn(self, sequence: Sequence[int], index: int = 0) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if index in self._drafted:
            self._drafted[index].candidates.learn(sequence)

    def close(self) -> None:
        """Free the context and the weights."""
        self._context.close()
        self._model.close()

    def _begin(self) -> None:
        self._drafted = {}
        self.steps = self.rows = 0

    def _below(self, candidates: TreeCandidates, memory: DraftMemory | None = None) -> GrowingTree | None:
        """A tree to grow below its root; None if the assistant cannot see all that it needs of it."""
        before = candidates.text[:-1]
        for shown in self._shown:
            if memory is not None and shown.memory is not memory:
                continue
            cache = shown.kv_cache
            if not isinstance(cache, BranchingCache) or cache.length != len(before) or shown.tokens != before:
                continue
            sequence_id = cache.ids[0]
            known = sequence_id < self._context.n_sequences
            if known and self._context.last_position(sequence_id) == len(before) - 1:
                return GrowingTree(sequence_id, shown.state, candidates)
        return None

    def _read(self, steps: Sequence[tuple[GrowingTree, Frontier]]) -> list[FloatArray]:
        """Read the nodes of draft steps together; returns their logits, valid until the next decode."""
        counts = [len(frontier.nodes) for _, frontier in steps]
        tokens = np.concatenate([frontier.tokens for _, frontier in steps])
        positions = np.repeat([growing.root_position for growing, _ in steps], counts)
        sequence_ids = np.repeat([growing.sequence_id for growing, _ in steps], counts)
        before = np.concatenate([growing.features_before(frontier) for growing, frontier in steps])
        parts = []
        for start in range(0, len(tokens), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            read = self._context.draft(
                tokens[part].tolist(), positions[part].tolist(), sequence_ids[part].tolist(), before[part]
            )
            parts.append(read if len(tokens) <= HEAD_ROWS else (read[0].copy(), read[1]))
        logits, features = (
            parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
        )
        self.steps += 1
        self.rows += len(tokens)
        found, end = [], 0
        for (growing, frontier), count in zip(steps, counts, strict=True):
            start, end = end, end + count
            growing.record(frontier, features[start:end])
            found.append(logits[start:end, : self._n_vocab])
        return found
