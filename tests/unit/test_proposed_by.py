"""The proposers of a token: the drafter's model, the text itself, or both."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.speculation.drafters.candidates import Expansions
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.evidence import NOTHING, CandidateSource
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.tree import TokenTree

NEVER = -np.inf


def frontier(node: int, token: int, parent: int, depth: int) -> Frontier:
    return Frontier(*(np.array([value], dtype=np.int32) for value in (node, token, parent, depth)))


def children(*candidates: tuple[int, float, int, int]) -> Children:
    """Candidates of one node: token, log-probability by the model, evidence in the text and by recycling."""
    tokens, logprobs, *evidence = zip(*candidates, strict=True)
    found = np.array([*evidence, *[[NOTHING] * len(tokens)] * (len(CandidateSource) - 2)], dtype=np.int8).T[
        None
    ]
    return Children(np.array([tokens], dtype=np.int32), np.array([logprobs], dtype=np.float32), found)


def test_each_candidate_has_its_proposer() -> None:
    expansions = Expansions()
    expansions.add(frontier(0, 5, -1, 0), children((7, -0.1, 1, 0), (8, -1.0, 2, 0), (9, NEVER, 1, 4)))
    # The third candidate was found as node 3, and is the second one in the tree that was kept.
    expansions.add(frontier(3, 9, 0, 1), children((7, NEVER, 5, 6), (5, -0.5, 1, 1)))
    tree = TokenTree.build([5, 8, 9, 7, 5, 7], [-1, 0, 0, 2, 2, 0], [0, -1, -1, -1, -2, -3])
    assert expansions.proposed_by(tree) == ["both", "recycled", "text", "model", "model"]


def test_nodes_that_were_no_candidates_are_the_models() -> None:
    """As in trees that were drawn from its distribution."""
    assert Expansions().proposed_by(TokenTree.chain([1, 2, 3])) == ["model", "model"]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_prompt_lookup_finds_all_in_the_text(text: list[int]) -> None:
    drafter = ProposingDrafter([TextSource()])
    tree = drafter.draft(text, TreeLimits(16), ProbabilityRanking())
    assert drafter.proposed_by(tree) == ["text"] * (len(tree) - 1)
