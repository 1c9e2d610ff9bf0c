"""The tree policies of `--tree`: each is a score, a stop rule, and the shape its paper prescribes.

All of them take the best nodes by a score that never rises along a path, so one search (`growth`) serves them
all. The target chooses every token itself, so the text is the same with every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import AcceptanceModel, Children, ExpansionPolicy, TreeLimits
from edgespec.speculation.learning.acceptance import CalibratedAcceptance
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import Counts, TableStore
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.ranking import CalibratedRanking, ProbabilityRanking, Ranking
from edgespec.speculation.tree import FloatArray

# Acceptance by rank that published trees assume of small drafters, until there are counts.
_USUAL_RANKS = np.array([0.68, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008])
_PRIOR = 20.0  # weight of the usual ranks, in candidates
_LONGEST_CHAIN = 16  # of policies that do not weigh a further step against what it adds


class RankAcceptance(AcceptanceModel):
    """The measured share of each rank among the target's choices (Sequoia, Chen et al. 2024, section 3).

    A node's score is the product of the shares on its path. Shares fall with the rank, so scores never rise
    along a path or across siblings, and the best nodes are the tree of the paper's dynamic program.
    """

    def __init__(self, store: TableStore, name: str, most: int = 16) -> None:
        self._counts = Counts(store, name, (most,))
        usual = np.full(most, _USUAL_RANKS[-1] / 2)
        usual[: len(_USUAL_RANKS)] = _USUAL_RANKS[:most]
        self._usual = usual

    @property
    def shares(self) -> FloatArray:
        """(ranks,) probability that the target chooses the candidate of each rank, never rising."""
        shares = (self._counts.taken + _PRIOR * self._usual) / (self._counts.tried + _PRIOR)
        return np.minimum.accumulate(shares).astype(np.float32)

    def logprobs(self, children: Children) -> FloatArray:
        logprobs: FloatArray = np.full(children.logprobs.shape, -np.inf, dtype=np.float32)
        listed = min(logprobs.shape[1], len(self._usual))
        logprobs[:, :listed] = np.log(self.shares[:listed])
        logprobs[~children.proposed] = -np.inf
        return logprobs

    def learn(self, children: Children, after: int, token: int) -> None:
        listed = min(children.tokens.shape[1], len(self._usual))
        self._counts.fade()
        (ranks,) = children.proposed[0, :listed].nonzero()
        taken = (children.tokens[0, ranks] == token).astype(np.float64)
        self._counts.add((ranks,), np.ones(len(ranks)), taken)

    def flush(self) -> None:
        self._counts.flush()


class UniformAcceptance(AcceptanceModel):
    """One score for every candidate: the tree fills level by level, siblings in the drafter's order."""

    def __init__(self, chance: float = 0.7) -> None:
        self._edge = np.float32(np.log(chance))

    def logprobs(self, children: Children) -> FloatArray:
        return np.where(children.proposed, self._edge, -np.inf).astype(np.float32)

    def learn(self, children: Children, after: int, token: int) -> None:
        pass


DEFAULT = "calibrated"


@dataclass(frozen=True)
class PolicyShape:
    """The limits that a policy itself sets to its trees; None leaves them as they are."""

    depth: int | None = None
    width: int | None = None
    branching: int | None = None
    leaves: int | None = None

    def clamp(self, limits: TreeLimits, depth: int | None = None, width: int | None = None) -> TreeLimits:
        """The limits with this shape; `depth` and `width` are the user's own settings."""
        return replace(
            limits,
            depth=min(depth or self.depth or limits.depth, limits.budget),
            width=min(width or self.width or limits.width, limits.budget),
            branching=self.branching or limits.branching,
            leaves=min(self.leaves or limits.leaves, limits.leaves),
        )


_SHAPES = {
    "opt-tree": PolicyShape(width=64),
    "eagle2": PolicyShape(depth=6, width=10, branching=10),
    "chain": PolicyShape(depth=_LONGEST_CHAIN, width=1, branching=1, leaves=1),
    "sequences": PolicyShape(depth=_LONGEST_CHAIN, width=4, branching=4, leaves=4),
}


@dataclass(frozen=True)
class TreePolicy:
    """The expansion of trees for one pair of models.

    Attributes:
        name: its name in `--tree`.
        store: what was learned of the pair.
        greedy, sampled: score and stop rule for greedy and for sampled answers.
        greedy_penalized, sampled_penalized: the same where penalties make repetition less likely, which
            changes how often candidates of every kind are accepted; None for no difference.
    """

    name: str
    store: TableStore
    greedy: ExpansionPolicy
    sampled: ExpansionPolicy
    greedy_penalized: ExpansionPolicy | None = None
    sampled_penalized: ExpansionPolicy | None = None

    def clamp(self, limits: TreeLimits, depth: int | None = None, width: int | None = None) -> TreeLimits:
        """The limits with this policy's shape; `depth` and `width` are the user's own settings."""
        return policy_shape(self.name).clamp(limits, depth, width)

    def expansion(self, config: GenerationConfig) -> ExpansionPolicy:
        """Score and stop rule for a target that chooses by `config`."""
        penalized = self.greedy_penalized if config.greedy else self.sampled_penalized
        if config.penalizes and penalized is not None:
            return penalized
        return self.greedy if config.greedy else self.sampled

    def ranking(self, config: GenerationConfig, noise: GumbelNoise) -> Ranking:
        """Return the ranking of the drafter's candidates for a target that chooses by `config`.

        Published policies rank by probability. The calibrated one also uses the noise that it shares with the
        target.
        """
        acceptance = self.expansion(config).acceptance
        if isinstance(acceptance, CalibratedAcceptance):
            return CalibratedRanking(config, noise, acceptance.calibration)
        return ProbabilityRanking(config.temperature or 1.0)

    def save(self) -> None:
        """Save what was learned for the next run."""
        for expansion in (self.greedy, self.sampled, self.greedy_penalized, self.sampled_penalized):
            if expansion is not None:
                expansion.acceptance.flush()
        self.store.save()


def _calibrated(store: TableStore) -> TreePolicy:
    calibration = DrafterCalibration(store)
    greedy, sampled, greedy_penalized, sampled_penalized = (
        ExpansionPolicy(CalibratedAcceptance(store, name, calibration))
        for name in ("greedy", "sampled", "greedy penalized", "sampled penalized")
    )
    return TreePolicy(
        "calibrated",
        store,
        greedy,
        sampled,
        greedy_penalized=greedy_penalized,
        sampled_penalized=sampled_penalized,
    )


def _specexec(store: TableStore) -> TreePolicy:
    return TreePolicy("specexec", store, ExpansionPolicy(), ExpansionPolicy())


def _sequoia(store: TableStore) -> TreePolicy:
    greedy, sampled = (
        ExpansionPolicy(RankAcceptance(store, f"{name} ranks")) for name in ("greedy", "sampled")
    )
    return TreePolicy("sequoia", store, greedy, sampled)


def _opt_tree(store: TableStore) -> TreePolicy:
    expansion = ExpansionPolicy(by_level=True, least_gain=0.1)
    return TreePolicy("opt-tree", store, expansion, expansion)


def _eagle2(store: TableStore) -> TreePolicy:
    expansion = ExpansionPolicy(by_level=True)
    return TreePolicy("eagle2", store, expansion, expansion)


def _chain(store: TableStore) -> TreePolicy:
    return TreePolicy("chain", store, ExpansionPolicy(), ExpansionPolicy())


def _sequences(store: TableStore) -> TreePolicy:
    expansion = ExpansionPolicy(UniformAcceptance(), by_level=True, later_branching=1)
    return TreePolicy("sequences", store, expansion, expansion)


_POLICIES: dict[str, Callable[[TableStore], TreePolicy]] = {
    "calibrated": _calibrated,
    "specexec": _specexec,
    "sequoia": _sequoia,
    "opt-tree": _opt_tree,
    "eagle2": _eagle2,
    "chain": _chain,
    "sequences": _sequences,
}
NAMES = tuple(_POLICIES)


def tree_policy(name: str = DEFAULT, store: TableStore | None = None) -> TreePolicy:
    """The policy of that name.

    Args:
        store: what was learned before, and where more is kept; None keeps it in memory only.

    Raises:
        UsageError: there is no policy of that name.
    """
    if name not in _POLICIES:
        raise UsageError(f"There is no tree policy '{name}'.", f"The policies are {', '.join(NAMES)}.")
    return _POLICIES[name](store or TableStore())


def policy_shape(name: str) -> PolicyShape:
    """The limits that the policy of that name sets to its trees, without the tables of the policy."""
    return _SHAPES.get(name, PolicyShape())
