"""Scores of the published policies, which do not depend on the drafter's logits here."""

from __future__ import annotations

import numpy as np

from edgespec.speculation.growth import Chances, Children
from edgespec.speculation.learning.tables import Counts, TableStore
from edgespec.speculation.tree import FloatArray

# Acceptance by rank that published trees assume of small drafters, until there are counts.
_USUAL_RANKS = np.array([0.68, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008])
_PRIOR = 20.0  # weight of the usual ranks, in candidates


class ByRank(Chances):
    """The measured share of each rank among the target's choices (Sequoia, Chen et al. 2024, section 3).

    A node's score is the product of the shares on its path. Shares fall with the rank, so scores never rise
    along a path or across siblings, and the best nodes are the tree of the paper's dynamic program.
    """

    def __init__(self, store: TableStore, name: str, most: int = 16) -> None:
        self._store = store
        self._counts = Counts(store, name, (most,))
        usual = np.full(most, _USUAL_RANKS[-1] / 2)
        usual[: len(_USUAL_RANKS)] = _USUAL_RANKS[:most]
        self._usual = usual

    @property
    def shares(self) -> FloatArray:
        """(ranks,) probability that the target chooses the candidate of each rank, never rising."""
        shares = (self._counts.taken + _PRIOR * self._usual) / (self._counts.tried + _PRIOR)
        return np.minimum.accumulate(shares).astype(np.float32)

    def edges(self, children: Children) -> FloatArray:
        edges: FloatArray = np.full(children.logprobs.shape, -np.inf, dtype=np.float32)
        listed = min(edges.shape[1], len(self._usual))
        edges[:, :listed] = np.log(self.shares[:listed])
        edges[~children.proposed] = -np.inf
        return edges

    def learn(self, children: Children, after: int, token: int) -> None:
        listed = min(children.tokens.shape[1], len(self._usual))
        self._counts.fade()
        (ranks,) = children.proposed[0, :listed].nonzero()
        taken = (children.tokens[0, ranks] == token).astype(np.float64)
        self._counts.add((ranks,), np.ones(len(ranks)), taken)

    def keep(self) -> None:
        self._counts.keep()
        self._store.keep()


class Even(Chances):
    """One score for every candidate: the tree fills level by level, siblings in the drafter's order."""

    def __init__(self, chance: float = 0.7) -> None:
        self._edge = np.float32(np.log(chance))

    def edges(self, children: Children) -> FloatArray:
        return np.where(children.proposed, self._edge, -np.inf).astype(np.float32)

    def learn(self, children: Children, after: int, token: int) -> None:
        pass

    def keep(self) -> None:
        pass
