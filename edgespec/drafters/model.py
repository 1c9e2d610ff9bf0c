"""The model drafter: a small model, resident in memory, grows trees with batched draft steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.draft_sequence import WHOLE, DraftSequence, DraftStep, DraftWindow
from edgespec.drafters.draft_sequences import DraftSequences, Wanted
from edgespec.drafters.translation import Translation
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.kv_cache import KVCache, common_prefix, decode_together
from edgespec.llama.cache.states import BLOCK, StateStore, cache_identity
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.speculation.drafters.base import DraftRequest, ProposedBy
from edgespec.speculation.drafters.candidates import TreeCandidates
from edgespec.speculation.drafters.merging import MergingDrafter
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.sizing.model_gain import ModelGain
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.tree_search import TreeSearch, grow_together
from edgespec.speculation.verification.base import DraftedTree

_TRIAL_TEXT = 32  # tokens before the rows that are timed
_USUAL_PENDING = 4  # tokens up to the root that are read in a usual round

_NO_LOGITS = np.empty((0, 0), dtype=np.float32)
_NO_STEP = object()


@dataclass(frozen=True)
class _Round:
    """A round of one sequence, until the target has decided."""

    length: int  # of the sequence
    promised: float  # expected tokens of the pass, by the proposers alone
    by_model: bool  # whether the model drafts


class ModelDrafter(MergingDrafter):
    """Drafts with a model, for one sequence or for several at once.

    Whatever a call raises and wherever it is interrupted, the next call first discards what it left behind.

    Args:
        proposers: sources whose candidates are merged into the tree (SpecInfer's collective tree, Miao et al.
            2024, section 3).
        window: what is read of long sequences; all of them for a model with a running state.
        translation: between its tokens and the target's, if its vocabulary is another one.
        max_rows: of a draft step for several sequences; None for as many as the context has outputs.
        name: of the model, for people; None for that of its file.

    Attributes:
        steps, rows: draft steps of the last trees, and nodes read in them.
        text_s: seconds of the decodes of those that read tokens that were new, beside the root.
        keeps_branches: whether what was read below the target's choice is of use for the next tree.
        may_rest: whether rounds for which the proposers' candidates are enough do without the model.
    """

    keeps_branches = True
    may_rest = True

    def __init__(
        self,
        model: Model,
        context: Context,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
        window: DraftWindow = WHOLE,
        *,
        translation: Translation | None = None,
        max_rows: int | None = None,
        name: str | None = None,
    ) -> None:
        # One vocabulary may be padded at its end; padding is no token of the other.
        own_vocabulary = model.vocabulary.n_tokens if translation is None else target_vocabulary
        self._n_vocab = min(own_vocabulary, target_vocabulary)
        super().__init__(proposers, name or model.path.stem, self._n_vocab)
        self._window = window
        self._max_rows = max_rows or context.n_outputs
        self._model = model
        self._context = context
        self._translation = translation
        self._sequences = DraftSequences(context, self._new_sequence, window)
        self._drafted: list[DraftSequence] = []  # those of the last trees, in order
        self._places: dict[int, int] = {}  # where each request of the last call is in there
        self._prompts: StateStore | None = None
        self._without_model = ProposingDrafter(proposers) if proposers and self.may_rest else None
        self._gain = ModelGain()
        self._round: _Round | None = None
        self.steps = self.rows = 0
        self._changing = False  # a call has begun and not ended

    def _new_sequence(self, cache: KVCache) -> DraftSequence:
        return DraftSequence(cache, self._n_vocab, self._window, self._translation)

    def _own(self, sequence: Sequence[int]) -> Sequence[int]:
        """The tokens that this model reads for a sequence."""
        return sequence if self._translation is None else self._translation.read(sequence)

    @property
    def root_was_known(self) -> bool:
        """True if the last tree's root had already been read in the search for the tree before."""
        return bool(self._drafted) and self._drafted[0].root_was_known

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        """A tree for each of several sequences, from one search.

        Sequences that the cache has no room for get trees of their roots only.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        self._begin()
        trees = [TokenTree.root_only(request.sequence[-1]) for request in requests]
        if len(requests) == 1 and (proposed := self._proposed(requests[0], limits)) is not None:
            self._changing = False
            return [proposed]
        served = self._with_room(requests, limits) if limits.allows_drafting else []
        if served:
            self._resume([requests[index] for index in served])
            searches = [TreeSearch(requests[index].sequence[-1], requests[index].limits) for index in served]
            if len(requests) > 1:
                limits = replace(limits, width=self._max_rows)
            grown = grow_together(searches, self._expand, limits, self._known)
            for index, tree in zip(served, grown, strict=True):
                trees[index] = tree if self._translation is None else self._translation.joined(tree)
        self._places = {index: place for place, index in enumerate(served)}
        self._changing = False
        return trees

    def _proposed(self, request: DraftRequest, limits: TreeLimits) -> TokenTree | None:
        """The tree of the proposers, if the model would cost more than it adds."""
        if self._without_model is None or not limits.min_gain or not request.limits.expansion.merges:
            return None
        free = replace(limits, min_gain=0.0, row_gain=0.0)
        (tree,) = self._without_model.draft_together([request], free)
        promised = float(np.exp(tree.logprobs, dtype=np.float64).sum())
        self._round = _Round(len(request.sequence), promised, by_model=self._gain.pays(promised, limits))
        return None if self._round.by_model else tree

    def draw(self, sequence: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree whose tokens are sampled from this model's distribution.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        self._begin()
        # Draws are not candidates: none is learned from or reused.
        own = self._own(sequence)
        if self._translation is not None and not self._sequences.with_room(
            [len(own)], len(drawing.shape.below)
        ):
            return DraftedTree(TokenTree.root_only(sequence[-1]))
        (drafted,) = self._drafted = self._sequences_for([Wanted(own)])
        self._recall(drafted, own, self._prompts)
        drafted.candidates = TreeCandidates(sequence)

        def read(frontier: Frontier) -> tuple[list[int], FloatArray]:
            step = DraftStep(drafted, frontier)
            (logits,) = self._read([step])
            return step.rows, logits

        tree = grow_drawn(sequence[-1], read, drawing, width)
        self._changing = False
        return tree

    def step_seconds(self, rows: int) -> float:
        """Seconds of one decode of this many rows, after a short sequence; the cache is emptied.

        Args:
            rows: at most the width that the drafter was opened with.

        Raises:
            DecodeAborted: stopped from outside.
        """
        self.forget()
        cache = self._sequences[0].cache
        n_vocab = self._model.vocabulary.n_tokens
        tokens = np.random.default_rng(rows).integers(0, n_vocab, _TRIAL_TEXT + rows).astype(np.int32)
        sequence, drafted = tokens[:_TRIAL_TEXT], tokens[_TRIAL_TEXT:]
        self._changing = True  # no sequence has these tokens, so the next call discards them
        cache.append(TokenBatch.run(sequence, 0, cache.open_paths, "last"))
        self._context.logits()
        start = time.perf_counter()
        cache.append(TokenBatch.run(drafted, _TRIAL_TEXT, cache.open_paths, "all"))
        self._context.logits()
        return time.perf_counter() - start

    def forget(self) -> None:
        """Forget everything that was read."""
        self._recover()
        self._sequences.forget()

    def proposed_by(self, tree: TokenTree, index: int = 0) -> list[ProposedBy]:
        """Return the proposer of each node of the last tree."""
        if self._without_model is not None and self._round is not None and not self._round.by_model:
            return self._without_model.proposed_by(tree)
        place = self._places.get(index)
        if place is None or place >= len(self._drafted):
            return super().proposed_by(tree, index)
        return self._drafted[place].candidates.proposed_by(tree)

    def learn(self, sequence: Sequence[int], index: int = 0) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if self._without_model is not None and self._round is not None:
            last, self._round = self._round, None
            draft = (self.steps, self.rows) if last.by_model else None
            self._gain.add(last.promised, len(sequence) - last.length, draft)
            if not last.by_model:
                self._without_model.learn(sequence)
                return
        place = self._places.get(index)
        if place is not None and place < len(self._drafted):
            self._drafted[place].learn(sequence)

    def close(self) -> None:
        """Free the context and the weights."""
        self._context.close()
        self._model.close()

    def recall(self, sequence: Sequence[int], folder: Path) -> None:
        """Restore as much of a long sequence as a folder holds, if more of it is unread than a block.

        Args:
            sequence: all but its last token may be restored.
        """
        sequence = self._own(sequence)
        if len(sequence) - max(known.agreement(sequence) for known in self._sequences) > BLOCK:
            self._begin()
            (drafted,) = self._drafted = self._sequences_for([Wanted(sequence)])
            self._recall(drafted, sequence, self._store_in(CheckedFiles(folder)))
            self._changing = False

    def save(self, sequence: Sequence[int], folder: Path) -> None:
        """Make a folder hold the state of as much of a sequence as was read, and of no other sequence."""
        self._begin()
        known, read = self._longest_read(self._own(sequence))
        if read:
            store = self._store_in(CheckedFiles(folder))
            store.save(known.cache, read, tail=True)
            store.prune(read, parts=known.cache.saves_parts)
        self._changing = False

    def keep_prompts(self, files: CheckedFiles) -> None:
        """Find the states of sequences in these files from now on; `store_block` writes them."""
        self._prompts = self._store_in(files)

    def store_block(self, sequence: Sequence[int]) -> bool:
        if self._prompts is None:
            return False
        self._begin()
        known, read = self._longest_read(self._own(sequence))
        stored = next(self._prompts.saving(known.cache, read, tail=False), _NO_STEP) is not _NO_STEP
        self._changing = False
        return stored

    def _longest_read(self, sequence: Sequence[int]) -> tuple[DraftSequence, list[int]]:
        """The cached sequence that has most of a sequence, and what it has of it that can be saved."""
        for known in self._sequences:  # their branches take the sequence ids
            known.forget_tree()
        best = max(self._sequences, key=lambda known: known.agreement(sequence))
        shared = common_prefix(best.read, best.part(sequence))
        can_be_saved = best.cache.saves_parts or shared == len(best.read)
        return best, best.read[:shared] if can_be_saved else []

    def _store_in(self, files: CheckedFiles) -> StateStore:
        identity = cache_identity(
            read_header(self._model.path),
            self._model,
            context=self._context.n_cells,
            rows=self._context.n_rows,
        )
        return StateStore(files, repr(sorted(identity.items())))

    def _begin(self) -> None:
        """Begin a call that changes the cache."""
        if self._changing:
            self._recover()
        self._changing = True
        self._places = {}
        self._round = None
        self.steps = self.rows = 0
        self.text_s = 0.0

    def _recover(self) -> None:
        """Return to the sequences that were certainly read, and forget the last trees."""
        self._changing = True  # in case this is interrupted too
        self._sequences.recover()
        self._drafted, self._places = [], {}
        self._changing = False

    def _with_room(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[int]:
        """The requests that the cache has room for."""
        if len(requests) == 1 and self._translation is None:
            return [0]  # it has as many cells as the target
        return self._sequences.with_room([len(self._own(r.sequence)) for r in requests], limits.budget)

    def _sequences_for(self, wanted: Sequence[Wanted]) -> list[DraftSequence]:
        """The sequence in the cache for each of these; see `DraftSequences.continued`."""
        return self._sequences.continued(wanted)

    def _resume(self, requests: Sequence[DraftRequest]) -> None:
        """Take up sequences where their last trees left them."""
        wanted = [Wanted(self._own(r.sequence), r.ranking, r.limits.branching, r.memory) for r in requests]
        self._drafted = self._sequences_for(wanted)
        for drafted, request, one in zip(self._drafted, requests, wanted, strict=True):
            self._recall(drafted, one.tokens, self._prompts)
            proposals = request.proposals(self._proposers)
            drafted.candidates = TreeCandidates(request.sequence, request.limits, request.ranking, proposals)

    def _recall(self, drafted: DraftSequence, sequence: Sequence[int], store: StateStore | None) -> None:
        """Restore as much of a long sequence as a store holds."""
        if store is not None and len(drafted.pending) > BLOCK:
            drafted.restore(store, sequence)

    def _expand(self, frontiers: Sequence[tuple[int, Frontier]]) -> list[Children]:
        """Expand several trees by a draft step."""
        known = [bool(self._known(place, frontier).all()) for place, frontier in frontiers]
        steps = [
            DraftStep(self._drafted[place], frontier)
            for (place, frontier), is_known in zip(frontiers, known, strict=True)
            if not is_known
        ]
        read = iter(zip(steps, self._read(steps), strict=True))
        found = []
        for (place, frontier), is_known in zip(frontiers, known, strict=True):
            sequence, rows, logits = self._drafted[place], [], _NO_LOGITS
            if not is_known:
                step, logits = next(read)
                rows = step.rows
            found.append(sequence.candidates.joined(frontier, sequence.ranked(frontier, rows, logits)))
        return found

    def _known(self, place: int, frontier: Frontier) -> NDArray[np.bool_]:
        """(nodes,) whether the candidates of a frontier's nodes are known already."""
        return self._drafted[place].known(frontier)

    def _read(self, steps: Sequence[DraftStep]) -> list[FloatArray]:
        """Decode the rows of draft steps together; their logits are valid until the next decode."""
        start, reads_sequence = (
            time.perf_counter(),
            any(len(step.sequence.pending) > _USUAL_PENDING for step in steps),
        )
        share = self._max_pending(steps)
        for step in steps:
            step.prepare(share)
        parts = [(step.sequence.cache, step.batch) for step in steps if step.batch is not None]
        if len(parts) == 1 and steps[0].reads_sequence:
            parts[0][0].append(parts[0][1])
        elif parts:
            decode_together(parts, 0, certain=0)
        for step in steps:
            if step.reads_sequence:
                if len(parts) > 1:
                    step.sequence.cache.appended(len(step.sequence.pending))
                step.sequence.note_pending_read()
        self.steps += bool(parts)
        self.rows += sum(step.n_nodes for step in steps)
        logits = self._context.logits() if parts else np.empty((0, self._n_vocab), dtype=np.float32)
        if self._translation is not None and parts:
            logits = self._translation.logits(logits)
        if reads_sequence:
            self.text_s += time.perf_counter() - start
        ends = np.cumsum([step.n_outputs for step in steps]).tolist()
        wanted = [slice(end - step.n_nodes, end) for step, end in zip(steps, ends, strict=True)]
        self._was_read(steps, wanted)
        return [logits[rows, : self._n_vocab] for rows in wanted]

    def _max_pending(self, steps: Sequence[DraftStep]) -> int:
        """Tokens of each step's sequence that may be read together with the steps."""
        most = self._context.n_rows
        return most if len(steps) < 2 else max((most - self._context.n_outputs) // len(steps), 1)

    def _was_read(self, steps: Sequence[DraftStep], rows: Sequence[slice]) -> None:
        """Called after each decode of draft steps, with the outputs that are those of their nodes."""
