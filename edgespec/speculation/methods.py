"""Methods: for each verification rule, how trees are drafted and which of their tokens are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from edgespec.base.option import named
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.rules import Rule
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.constraint import ConstrainedRanking, Constraint
from edgespec.speculation.drafters.base import Drafter, DraftMemory, DraftRequest, NoDrafter, TreeDrafting
from edgespec.speculation.draws import DrawSource, SeededDraws
from edgespec.speculation.growth import ExpansionPolicy, TreeLimits
from edgespec.speculation.noise import NoiseCache, NoiseStream
from edgespec.speculation.policies import TreePolicy, tree_policy
from edgespec.speculation.ranking import AdjustedRanking, ConfidenceFloor, ProbabilityRanking, Ranking
from edgespec.speculation.sampled_trees import (
    DrawingDrafter,
    SampledDrafting,
    TreeShape,
    by_rank,
    chain,
    sequences,
)
from edgespec.speculation.sampling import Sampler, sample_and_match
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree, Law, Verifier
from edgespec.speculation.verification.lossy import Rollback, TopKGap, Typical
from edgespec.speculation.verification.rejection import BlockVerifier, KSequential, Rejection

# Nodes per pass where more would cost time, unless the user sets a number. Under these rules the text depends
# on what is drafted, so a size that followed the times of passes would make the text differ from run to run.
_CHAIN_NODES = 8
_TREE_NODES = 16

_COLDEST = 0.01  # below this the drafter's first candidate has all the probability anyway


class DecodingMethod(Protocol):
    """The way of making rounds under one rule."""

    rule: Rule  # the rule in force
    drafting: TreeDrafting  # how trees are drafted
    nodes: int | None  # nodes per pass by default; None sizes trees by measured cost
    chain: bool = False  # whether they are a single path

    def accept(self, drafted: DraftedTree, logits: FloatArray, sequence: list[int]) -> Acceptance:
        """Decide what is accepted, and append it and the bonus token to the sequence.

        Args:
            logits: (nodes, n_vocab) the target's.
        """


@dataclass(frozen=True)
class RankedDrafting(TreeDrafting):
    """The best nodes by a ranking, as a tree or as a chain.

    Attributes:
        expansion: score and stop rule, which may learn from how the sequence continues. The default scores by
            the drafter's own probability and merges in nothing from the sequence, for rules that judge the
            drafter's tokens.
        own: sources of this answer alone.
    """

    ranking: Ranking
    chain: bool = False
    constraint: Constraint | None = None
    expansion: ExpansionPolicy = ExpansionPolicy(merges=False, keeps_ends=True)  # noqa: RUF009 (frozen)
    own: Sequence[Proposer] = ()

    def draft(
        self,
        drafter: Drafter,
        sequence: Sequence[int],
        limits: TreeLimits,
        memory: DraftMemory | None = None,
    ) -> DraftedTree:
        request = self.request(sequence, limits, memory)
        (tree,) = drafter.draft_together([request], request.limits)
        return self.drafted(tree, sequence)

    def request(
        self, sequence: Sequence[int], limits: TreeLimits, memory: DraftMemory | None = None
    ) -> DraftRequest:
        limits = replace(limits, expansion=self.expansion)
        if self.chain:
            limits = replace(limits, leaves=1, width=1, branching=1)
        self.ranking.begin(sequence)
        return DraftRequest(sequence, limits, self.ranking, memory, self.own)

    def drafted(self, tree: TokenTree, sequence: Sequence[int]) -> DraftedTree:
        return DraftedTree(tree if self.constraint is None else self.constraint.pruned(tree, sequence))


class SamplingMethod(DecodingMethod):
    """The target chooses every token; the draft only decides how many choices one pass can make."""

    nodes = None

    def __init__(
        self, rule: Rule, drafting: TreeDrafting, sampler: Sampler, constraint: Constraint | None = None
    ) -> None:
        self.rule = rule
        self.drafting = drafting
        self._sampler = sampler
        self._constraint = constraint

    def accept(self, drafted: DraftedTree, logits: FloatArray, sequence: list[int]) -> Acceptance:
        tree = drafted.tree
        if self._constraint is not None:
            logits = self._constraint.masked(logits, tree, sequence)

        def choose(node: int) -> int:
            if node:
                sequence.append(int(tree.tokens[node]))
            return self._sampler.choose(logits[node], sequence)

        accepted = sample_and_match(tree, choose)
        sequence.append(accepted.bonus)
        return accepted


@dataclass(frozen=True)
class OneHotDrafting(TreeDrafting):
    """The best chain, presented as draws from distributions that have a single token each.

    Args:
        n_vocab: size of the target's vocabulary.
    """

    n_vocab: int

    def draft(
        self,
        drafter: Drafter,
        sequence: Sequence[int],
        limits: TreeLimits,
        memory: DraftMemory | None = None,
    ) -> DraftedTree:
        tree = RankedDrafting(ProbabilityRanking(), chain=True).draft(drafter, sequence, limits, memory).tree
        tokens = list(enumerate(tree.tokens[1:].tolist()))
        return DraftedTree(
            tree,
            {node: [token] for node, token in tokens},
            {node: self._one_hot(token) for node, token in tokens},
        )

    def _one_hot(self, token: int) -> Law:
        law = np.zeros(self.n_vocab)
        law[token] = 1.0
        return law


class VerifierMethod(DecodingMethod):
    """A verifier accepts or rejects drafted tokens, by the target's law (see `verification.base`)."""

    def __init__(
        self,
        rule: Rule,
        drafting: TreeDrafting,
        nodes: int,
        verifier: Verifier,
        sampler: Sampler,
        draws: DrawSource,
        *,
        chain: bool = False,
    ) -> None:
        self.rule = rule
        self.drafting = drafting
        self.nodes = nodes
        self.chain = chain
        self._verifier = verifier
        self._sampler = sampler
        self._draws = draws

    def accept(self, drafted: DraftedTree, logits: FloatArray, sequence: list[int]) -> Acceptance:
        tree = drafted.tree

        def below(node: int) -> list[int]:
            return [int(tree.tokens[step]) for step in tree.path(node)[1:]]

        def law(node: int) -> Law:
            return self._sampler.law(logits[node], sequence, below(node))

        accepted = self._verifier.accept(drafted, law, self._draws(NoiseStream.ACCEPTING, len(sequence)))
        sequence += [*below(accepted.path[-1]), accepted.bonus]
        return accepted


def method_for(
    config: GenerationConfig,
    n_vocab: int,
    seed: int,
    drafter: Drafter,
    constraint: Constraint | None = None,
    draws: DrawSource | None = None,
    policy: TreePolicy | None = None,
    noise: NoiseCache | None = None,
    adjustments: Adjustments | None = None,
    own: Sequence[Proposer] = (),
) -> DecodingMethod:
    """The method for these settings and this drafter.

    Args:
        n_vocab: size of the target's vocabulary.
        constraint: the grammar, if there is one.
        draws: source of randomness, if it is not the seed.
        policy: how trees grow where the target chooses greedily or by shared noise. The other rules
            prescribe their drafts themselves, and the policy learns nothing from them.
        noise: kept from other answers; None for a cache of this answer's own.
        adjustments: as for `Sampler`.
        own: sources of this answer alone, for the rules under which drafts do not change the text.

    Raises:
        UsageError: the rule needs tokens sampled from a distribution, and the drafter has none; or it
            compares drafts with the target's distribution, and there is a grammar.
    """
    rule = config.rule

    def chosen(ranking: Ranking, sampler: Sampler, expansion: ExpansionPolicy) -> DecodingMethod:
        """The target chooses; drafts are ranked by what it sees: adjusted logits of permitted tokens."""
        if sampler.adjustments.exist:
            ranking = AdjustedRanking(ranking, sampler.adjustments)
        if constraint is not None:
            ranking = ConstrainedRanking(ranking, constraint)
        drafting = RankedDrafting(ranking, constraint=constraint, expansion=expansion, own=own)
        return SamplingMethod(rule, drafting, sampler, constraint)

    if rule.name == "specexec":
        sampler = Sampler(config, n_vocab, seed, NoiseStream.OWN, noise, adjustments)
        ranking = ProbabilityRanking(max(config.temperature, _COLDEST))
        return chosen(ranking, sampler, ExpansionPolicy())
    if rule.kind.invariant:
        sampler = Sampler(config, n_vocab, seed, cache=noise, adjustments=adjustments)
        policy = policy or tree_policy()
        return chosen(policy.ranking(config, sampler.noise), sampler, policy.expansion(config))
    if constraint is not None:
        raise UsageError(
            f"The rule '{rule.name}' cannot be combined with a grammar, tools or a thinking budget, "
            "which change what is drafted.",
            f"With any of them, use {named('verify', 'shared-noise')} or {named('verify', 'specexec')}.",
        )
    if rule.kind.drawn and not isinstance(drafter, DrawingDrafter | NoDrafter):
        raise UsageError(
            f"The rule '{rule.name}' needs tokens sampled from a model; {drafter.name} samples none.",
            f"Name a small model with {named('draft', 'PATH')}, or use {named('verify', 'specexec')}.",
        )
    source = draws or partial(SeededDraws, seed)
    # Rules that are defined at a temperature of 0 use the distribution at temperature 1 there.
    config = config.with_(temperature=config.temperature or 1.0)
    sampler = Sampler(config, n_vocab, seed, cache=noise, adjustments=adjustments)

    def drawn(shape: Callable[[TreeLimits], TreeShape], *, replacement: bool = True) -> TreeDrafting:
        if isinstance(drafter, DrawingDrafter):
            return SampledDrafting(shape, replacement, sampler, n_vocab, source)
        return OneHotDrafting(n_vocab)

    def method(
        drafting: TreeDrafting, nodes: int, verifier: Verifier, *, chain: bool = False
    ) -> DecodingMethod:
        return VerifierMethod(rule, drafting, nodes, verifier, sampler, source, chain=chain)

    if rule.name == "speculative":
        return method(drawn(chain), _CHAIN_NODES, Rejection(), chain=True)
    if rule.name == "lenience":
        return method(drawn(chain), _CHAIN_NODES, Rejection(lenience=rule["factor"]), chain=True)
    if rule.name == "block":
        return method(drawn(chain), _CHAIN_NODES, BlockVerifier(), chain=True)
    if rule.name == "specinfer":
        return method(drawn(by_rank), _TREE_NODES, Rejection(replacement=True))
    if rule.name == "spectr":
        return method(drawn(sequences), _TREE_NODES, KSequential())
    if rule.name == "recursive":
        return method(drawn(by_rank, replacement=False), _TREE_NODES, Rejection())
    if rule.name == "typical":
        return method(
            RankedDrafting(ProbabilityRanking()), _TREE_NODES, Typical(rule["epsilon"], rule["delta"])
        )
    if rule.name == "topk-gap":
        return method(RankedDrafting(ProbabilityRanking()), _TREE_NODES, TopKGap(int(rule["k"]), rule["gap"]))
    assert rule.name == "rollback", f"no method for {rule.name}"
    drafting = RankedDrafting(ConfidenceFloor(rule["fallback"]), chain=True)
    return method(drafting, _TREE_NODES, Rollback(rule["distance"], int(rule["mismatches"])), chain=True)
