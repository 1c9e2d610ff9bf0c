"""Speculation: who drafts the trees of passes, how large they are, and what is learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.costs.pass_time import RoundCosts
from edgespec.engine.observation import ObservationPolicy
from edgespec.engine.plain_passes import PlainPasses
from edgespec.engine.sequence import Batch, Sizer, TextSequence
from edgespec.engine.target import Target
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.generation.result import PassRecord
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.constraint import Constraint
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod, method_for
from edgespec.speculation.noise import NoiseCache, noise_bytes
from edgespec.speculation.policies import TreePolicy, tree_policy
from edgespec.speculation.sizing.sizers import (
    FIRST_BUDGET,
    AdaptiveSizer,
    FixedSizer,
    PassRoom,
    fixed_nodes,
)
from edgespec.speculation.sources.answers import Answers
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.spelling import Spelling
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

# Nodes of the first tree where every row needs experts of its own: even a small one may cost several plain
# passes there.
_FIRST_NODES_BY_EXPERT = 2


@dataclass(frozen=True)
class Drafts:
    """The drafts of one batch.

    Attributes:
        trees: one for each sequence.
        asked: indices of the sequences that the drafter was asked for, in its own order.
        steps, rows, text_s: what the drafter took for them; see `Drafter`.
    """

    trees: list[DraftedTree]
    asked: list[int]
    steps: int = 0
    rows: int = 0
    text_s: float = 0.0


class Speculator:
    """Drafts the trees of passes, decides how large they are, and learns from what became of them.

    Args:
        limits: limits of trees that are asked for; None for none.
        tree_budget: the size of all trees; None to follow the measured cost.
        costs: what passes and drafts take, as far as it was measured; None if it was not.
        answers: most answers at once.
        earlier: the answers so far, to draft from; None if they are not kept.
        read_share_alone: the share of the target's reads that would remain without the drafter.

    Attributes:
        drafter: guesses how sequences continue, as trees.
        limits: limits that no tree may exceed.
        policy: how trees grow.
        costs: as given.
        sizer: decides how large trees are.
        earlier: as given.
        plain_passes: what a pass without drafts takes at present.
        profile_updates: what this run measures, which corrects the profile for the next one if it may learn.
        last_round: the latest tree with drafted tokens, and what was accepted of it; None if the latest
            answer that had the target to itself has drafted nothing. The sequence, which had it first, ends
            with its answer.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        updates: ProfileUpdates,
        *,
        limits: TreeLimits | None = None,
        tree_budget: int | None = None,
        policy: TreePolicy | None = None,
        costs: RoundCosts | None = None,
        answers: int = 1,
        earlier: Answers | None = None,
        read_share_alone: float = 1.0,
    ) -> None:
        self._target = target
        self.drafter = drafter
        self.limits = _limits_for(target, limits, tree_budget)
        self.policy = policy or tree_policy()
        self.costs = costs
        by_expert = target.model.weights.expert_use is not None
        self._first_nodes = _FIRST_NODES_BY_EXPERT if by_expert else FIRST_BUDGET
        self.sizer: Sizer = self._new_sizer(fixed=self.limits if tree_budget else None)
        self.plain_passes = PlainPasses(costs.verify if costs else None, read_share_alone)
        self.profile_updates = updates
        self.last_round: tuple[TokenTree, Acceptance] | None = None
        n_vocab, drafts = target.model.vocabulary.n_tokens, not isinstance(drafter, NoDrafter)
        self._noise = NoiseCache(noise_bytes(n_vocab, drafts=drafts, answers=answers))
        self._spelling = Spelling(target.model.vocabulary)
        self._decisions = Decisions()
        self._observation = ObservationPolicy()
        self.earlier = earlier

    @property
    def decisions(self) -> Decisions:
        """Decisions that are forced instead of following from measured costs; may be set between answers."""
        return self._decisions

    @decisions.setter
    def decisions(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._observation.forced = decisions.observing

    def set_budget(self, budget: int | None) -> None:
        """Set the size of trees from now on: the nodes per pass, or None to follow the measured cost."""
        self.sizer = self._new_sizer(fixed=replace(self.limits, budget=budget) if budget else None)

    def _new_sizer(self, *, fixed: TreeLimits | None) -> Sizer:
        """Return the sizer of trees: always `fixed`, or by measured cost."""
        return FixedSizer(fixed) if fixed else AdaptiveSizer(self.limits, self.costs, self._first_nodes)

    def forget_texts(self) -> None:
        """Forget what was learned and kept of texts so far, in this process and not on disk."""
        self.policy = tree_policy(self.policy.name)
        self.drafter.forget_sequences()
        if self.earlier is not None:
            self.earlier.forget()

    def method(
        self,
        config: GenerationConfig,
        seed: int,
        constraint: Constraint | None,
        start: int,
        own: Sequence[Proposer] = (),
    ) -> tuple[DecodingMethod, Sizer]:
        """Return the decoding method of an answer, and the sizer of its trees.

        Args:
            start: where the answer begins in the text.
            own: sources of this answer alone.

        Raises:
            UsageError: see `method_for`.
        """
        n_vocab = self._target.model.vocabulary.n_tokens
        adjustments = Adjustments(config, n_vocab, self._spelling, start)
        method = method_for(
            config,
            n_vocab,
            seed,
            self.drafter,
            constraint,
            policy=self.policy,
            noise=self._noise,
            adjustments=adjustments,
            own=own,
        )
        if method.nodes is None or isinstance(self.sizer, FixedSizer):
            return method, self.sizer
        nodes = fixed_nodes(method.nodes, self.costs, self.limits, chain=method.chain)
        return method, FixedSizer(replace(self.limits, budget=nodes))

    def draft(self, batch: Batch) -> Drafts:
        """Draft a tree for each sequence of a batch; note who proposed the nodes of those that are traced."""
        drafter, own = self.drafter, batch.sole_sequence
        drafts = self._draft_together(batch) if own is None else self._draft_one(own)
        for sequence in batch.sequences:
            sequence.proposed_by = []
        # Now, because the drafter forgets who proposed what when it learns from the trees.
        for place, index in enumerate(drafts.asked):
            sequence = batch.sequences[index]
            if sequence.is_traced:
                sequence.proposed_by = drafter.proposed_by(drafts.trees[index].tree, place)
        if not drafts.asked:
            return drafts
        return replace(drafts, steps=drafter.steps, rows=drafter.rows, text_s=drafter.text_s)

    def observe(self, batch: Batch, drafts: Drafts, logits: Sequence[FloatArray], verify_s: float) -> float:
        """Show the drafter what the target said in a pass; returns the seconds that it looked.

        Args:
            logits: of each tree.
            verify_s: seconds of the pass.
        """
        resting_s = None if drafts.asked or not batch.sequences else verify_s / len(batch.sequences)
        return sum(
            self._observation.show(self.drafter, sequence.text, draft.tree, rows, resting_s)
            for sequence, draft, rows in zip(batch.sequences, drafts.trees, logits, strict=True)
        )

    def learn_choices(self, batch: Batch, drafts: Drafts) -> None:
        """Teach the drafter what the target chose; before the caches are changed."""
        for sequence, draft in zip(batch.sequences, drafts.trees, strict=True):
            if sequence.error is None and len(draft.tree) > 1:
                self.last_round = sequence.last_round
        for place, index in enumerate(drafts.asked):
            if batch.sequences[index].error is None:
                self.drafter.learn(batch.sequences[index].text, place)

    def learn_times(self, batch: Batch, record: PassRecord) -> None:
        """Adapt the next sizes to the time and yield of a pass."""
        n_sequences = len(batch.sequences)
        if not n_sequences:
            return
        other_rows = record.prompt_rows + batch.chunk_rows
        own = batch.sole_sequence
        sizer = self.sizer if own is None else own.sizer
        sizer.record(record, n_sequences, other_rows)
        if n_sequences == 1 and not other_rows:
            self.plain_passes.add(record)
        by_rows = replace(record, nodes=record.nodes + batch.chunk_rows)
        self.profile_updates.add_pass(by_rows, self._target.context.n_threads)

    def learn_tree(self, sequence: TextSequence, record: PassRecord, accepted: int) -> None:
        """Count what a tree yielded, for a sequence that had the pass to itself.

        Args:
            accepted: drafted tokens that became part of the answer.
        """
        answer = sequence.answer
        if record.nodes > 1 and answer.config.rule.kind.invariant and not answer.constrained:
            assert sequence.last_round is not None
            tree, choice = sequence.last_round
            path = choice.path[: accepted + 1]
            self.profile_updates.add_tree(tree, path, record, answer.config.temperature)

    def _draft_one(self, sequence: TextSequence) -> Drafts:
        """The tree of a sequence that has a pass to itself: its method may prescribe what kind of tree."""
        unread = sequence.unread
        room = PassRoom(self._target.max_unread + 1 - unread, unread) if unread else None
        limits = sequence.clamp(self._limits(sequence.sizer, 1, room))
        # Texts beside it in the cache may hold ids that its leaves would need.
        limits = replace(limits, leaves=min(limits.leaves, sequence.kv_cache.max_paths))
        if not limits.allows_drafting and not self.drafter.reads_target:
            # Where a pass takes a few milliseconds, it would show what a drafter does to draft nothing.
            return Drafts([DraftedTree(TokenTree.root_only(sequence.tokens[-1]))], [])
        return Drafts(
            [sequence.method.drafting.draft(self.drafter, sequence.text, limits, sequence.memory)], [0]
        )

    def _draft_together(self, batch: Batch) -> Drafts:
        """The trees of a shared pass, from one search.

        The rows that neither the sequences nor the prompts need go to drafted nodes, of whichever sequences
        they are worth most for.
        """
        sequences, other_rows = batch.sequences, batch.other_rows
        most = self._target.max_nodes - batch.scored_rows
        room = PassRoom(min(batch.max_rows - other_rows, most), other_rows)
        trees = [DraftedTree(TokenTree.root_only(sequence.tokens[-1])) for sequence in sequences]
        if not sequences or room.nodes <= len(sequences):
            return Drafts(trees, [])
        limits = self._limits(self.sizer, len(sequences), room)
        # Under some rules the text depends on its trees, so nothing else may influence them.
        requests = {}
        for index, sequence in enumerate(sequences):
            if not sequence.method.rule.kind.invariant:
                continue
            drafting, own = sequence.method.drafting, sequence.clamp(limits)
            if (request := drafting.request(sequence.text, own, sequence.memory)) is not None:
                requests[index] = request
        plain = len(sequences) - len(requests)
        limits = replace(
            limits,
            budget=limits.budget - plain,
            free_nodes=max(limits.free_nodes - plain, 1),
            leaves=min(limits.leaves, len(requests) + self._target.n_free_leaves),
        )
        if limits.budget <= len(requests):
            return Drafts(trees, [])
        grown = self.drafter.draft_together(list(requests.values()), limits)
        for index, tree in zip(requests, grown, strict=True):
            trees[index] = sequences[index].method.drafting.drafted(tree, sequences[index].text)
        return Drafts(trees, list(requests))

    def _limits(self, sizer: Sizer, sequences: int, room: PassRoom | None) -> TreeLimits:
        """Limits of the next trees, with what is forced."""
        if self._decisions.drafting:
            sizer = FixedSizer(sizer.most)
        limits = sizer.limits(sequences, room)
        if (most := self._target.max_nodes - self._target.n_pending) < limits.budget:
            limits = replace(limits, budget=most, free_nodes=min(limits.free_nodes, most))
        return replace(limits, budget=sequences) if self._decisions.drafting is False else limits


def most_unread(sequence: TextSequence, target: Target, drafter: Drafter) -> int:
    """Tokens at the end of a prompt that the pass of its first tree may read."""
    # A head drafts from hidden states of the whole prompt, and a full sequence gets no tree.
    if drafter.reads_target or sequence.is_full:
        return 0
    return max(target.max_unread - FIRST_BUDGET, 0)


def _limits_for(target: Target, limits: TreeLimits | None, tree_budget: int | None) -> TreeLimits:
    """Limits that no tree may exceed.

    Args:
        limits: those that are asked for; None for none.
        tree_budget: the size that is asked for; None to follow the measured cost.
    """
    most = limits or TreeLimits(budget=target.max_nodes)
    most = replace(
        most,
        budget=min(tree_budget or most.budget, target.max_nodes),
        leaves=min(most.leaves, target.max_leaves),
        is_end=target.model.vocabulary.ends,
    )
    if target.rule is not None and target.model.weights.expert_use is None:
        # Passes are padded to these rows anyway, so filling them costs nothing.
        most = replace(
            most, row_multiple=target.rule.multiple, free_nodes=min(target.rule.minimum, most.budget)
        )
    if most.leaves == 1:
        most = replace(most, width=1, branching=1)
    return most
