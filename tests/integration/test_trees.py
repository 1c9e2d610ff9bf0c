"""Tree policies and merged drafters on the real pair: other trees, the same text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.errors import UsageError
from edgespec.files.user_folders import cache_folder
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import AcceptanceModel, Children, ExpansionPolicy
from edgespec.speculation.learning.acceptance import CalibratedAcceptance
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import TableStore
from edgespec.speculation.methods import method_for
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import NAMES, TreePolicy, tree_policy
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.tree import FloatArray, TokenTree
from tests.tiers import slow_except
from tests.unit.strategies import texts_of

PROMPT = "Write about a fox that lives in the forest, and a crow that lives in the tall tree by the lake."
CONFIGS = [
    GenerationConfig(max_tokens=20),
    GenerationConfig(max_tokens=20, temperature=0.8, seed=3),
    GenerationConfig(max_tokens=20, temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, seed=4),
    GenerationConfig(
        max_tokens=20,
        dry_multiplier=1.0,
        dry_allowed_length=1,
        dry_sequence_breakers=(". ",),
        banned_strings=("the", " forest", "CROW"),
    ),
    GenerationConfig(
        max_tokens=20,
        temperature=0.8,
        top_n_sigma=2.0,
        xtc_probability=0.4,
        dry_multiplier=1.0,
        banned_strings=(" old",),
        seed=11,
    ),
]


@pytest.fixture(scope="module")
def texts(smol_path: Path) -> list[list[int]]:
    with edgespec.load(smol_path, draft="none", exact=True, context=256) as engine:
        return [engine.generate(PROMPT, config).tokens for config in CONFIGS]


@pytest.fixture(scope="module")
def engine(smol_path: Path, q4_drafter_path: Path) -> Iterator[Engine]:
    with edgespec.load(
        smol_path, draft=q4_drafter_path, drafter="model", exact=True, tree_budget=24, context=256
    ) as engine:
        yield engine


@pytest.mark.parametrize("name", slow_except(["sequoia"], NAMES))
def test_the_text_does_not_depend_on_the_policy(engine: Engine, texts: list[list[int]], name: str) -> None:
    engine.speculator.policy = tree_policy(name)
    sizer = engine.speculator.sizer
    engine.speculator.sizer = type(sizer)(engine.speculator.policy.clamp(sizer.limits()))
    try:
        answers = [engine.generate(PROMPT, config) for config in CONFIGS]
    finally:
        engine.speculator.sizer = sizer
    assert [answer.tokens for answer in answers] == texts
    assert all(answer.tokens_per_pass > 1.5 for answer in answers)
    assert all(record.draft_steps for record in answers[0].passes[:-1])


@pytest.mark.parametrize("drafter", slow_except(["merged"], ["merged", "model"]))
def test_merged_drafters_give_the_same_text(
    smol_path: Path, dropped_drafter_path: Path, texts: list[list[int]], drafter: str
) -> None:
    with edgespec.load(
        smol_path, draft=dropped_drafter_path, drafter=drafter, exact=True, tree_budget=24, context=256
    ) as engine:
        assert [engine.generate(PROMPT, config).tokens for config in CONFIGS] == texts
        merged = drafter == "merged"
        assert ("prompt lookup" in engine.description) == merged


class _Watched(AcceptanceModel):
    """Notes what is learned, and of whom."""

    def __init__(self, acceptance: AcceptanceModel) -> None:
        self.acceptance = acceptance
        self.evidence: list[tuple[int, int]] = []

    def logprobs(self, children: Children) -> FloatArray:
        return self.acceptance.logprobs(children)

    def learn(self, children: Children, after: int, token: int) -> None:
        self.evidence.append((after, token))
        self.acceptance.learn(children, after, token)

    def flush(self) -> None:
        self.acceptance.flush()


def test_every_accepted_token_is_evidence_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(CalibratedAcceptance(TableStore(), "greedy"))
    policy = TreePolicy("watched", TableStore(), ExpansionPolicy(watched), ExpansionPolicy())
    monkeypatch.setattr(engine.speculator, "policy", policy)
    engine.target.rewind(0)
    answer = engine.generate("Write a story.", CONFIGS[0])
    text = [*engine.encoder.encode("Write a story.")[-1:], *answer.tokens]
    pairs = iter(itertools.pairwise(text))
    # In the order of the text; what followed nodes that were not expanded is passed over.
    assert all(any(found == pair for found in pairs) for pair in watched.evidence)
    assert len(answer.tokens) / 3 < len(watched.evidence) <= len(answer.tokens)


def test_what_a_person_types_is_no_evidence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt continues just as the drafter expects the target to."""
    watched = _Watched(CalibratedAcceptance(TableStore(), "greedy"))
    policy = TreePolicy("watched", TableStore(), ExpansionPolicy(watched), ExpansionPolicy())
    monkeypatch.setattr(engine.speculator, "policy", policy)
    prompt = engine.encoder.encode(PROMPT)
    answer = engine.generate(prompt, CONFIGS[0].with_(max_tokens=12))
    assert engine.speculator.last_round is not None
    tree, accepted = engine.speculator.last_round
    learned = len(watched.evidence)
    assert watched.evidence[-1] in itertools.pairwise([*tree.tokens[list(accepted.path)], accepted.bonus])
    drafter = engine.drafter
    limits = engine.speculator.sizer.limits()
    ranking = engine.speculator.policy.ranking(CONFIGS[0], GumbelNoise(0, 49152))
    guess = drafter.draft(
        [*prompt, *answer.tokens], replace(limits, expansion=ExpansionPolicy(watched)), ranking
    )
    typed = [int(guess.tokens[node]) for node in guess.path(int(guess.leaves[0]))[1:]]
    engine.generate([*prompt, *answer.tokens, *typed], CONFIGS[0].with_(max_tokens=1))
    assert len(watched.evidence) <= learned + 1, "the one token that the target chose"


@pytest.mark.parametrize("merges", [True, False])
def test_a_merged_drafter_leaves_out_what_only_the_text_proposes(
    smol_path: Path, q4_drafter_path: Path, merges: bool
) -> None:
    with edgespec.load(smol_path, draft=q4_drafter_path, tree_budget=16, context=256, threads=1) as engine:
        drafter = engine.drafter
        assert isinstance(drafter, ModelDrafter)
        text = engine.encoder.encode("red zebra, blue zebra, red zebra, blue zebra, red", raw=True)
        limits = replace(
            engine.speculator.sizer.limits(), depth=1, branching=2, expansion=ExpansionPolicy(merges=merges)
        )
        tree = drafter.draft([*text[:-1], text[-1], text[0] + 1, text[-1]], limits, ProbabilityRanking())
        found = set(tree.tokens[1:].tolist())
        drafter._proposers = ()
        alone = drafter.draft([*text[:-1], text[-1], text[0] + 1, text[-1]], limits, ProbabilityRanking())
        own = set(alone.tokens[1:].tolist())
        assert own <= found
        assert (found == own) == (not merges)


def test_picking_continues_where_drawing_ended(smol_path: Path, q4_drafter_path: Path) -> None:
    """Rows read for a drawn tree are kept, and none of its candidates is taken for one of the ranking."""
    with edgespec.load(smol_path, draft=q4_drafter_path, tree_budget=16, context=256, threads=1) as engine:
        drafter = engine.drafter
        assert isinstance(drafter, ModelDrafter)
        # Few enough tokens that attention's kernel is the same however many of them are read at once.
        text = engine.encoder.encode(PROMPT, raw=True)
        assert len(text) < 40
        acceptance = _Watched(CalibratedAcceptance(TableStore(), "sampled"))
        limits = replace(engine.speculator.sizer.limits(), expansion=ExpansionPolicy(acceptance))
        sampled = GenerationConfig(temperature=1.0, verify="specinfer")
        drawing = method_for(sampled, 49152, 5, drafter).drafting
        ranking = ProbabilityRanking()
        for _ in range(2):  # also the other way round
            drawn = drawing.draft(drafter, text, limits).tree
            assert len(drawn) > 8
            node = int(drawn.leaves[-1])
            text += [int(drawn.tokens[n]) for n in drawn.path(node)[1:]]
            drafter.learn(text)
            tree = drafter.draft(text, limits, ranking)
            text.append(int(tree.tokens[1]))
        assert acceptance.evidence == [], "draws say nothing of the candidates"
        drafter.forget()
        fresh = drafter.draft(text[:-1], limits, ranking)
        # The fresh cache holds its cells in another order, and attention sums values in half precision in the
        # order of the cells: the same text in other cells has been seen to differ by 0.3.
        assert_same_but_for_rounding(tree, fresh, rounding=0.5)


def assert_same_but_for_rounding(tree: TokenTree, other: TokenTree, rounding: float = 0.1) -> None:
    """Nodes that both trees hold score alike; what only one of them holds is at the edge of its budget.

    The same tokens were read in other batches, so that kernels may have rounded differently.
    """
    scores, others = texts_of(tree), texts_of(other)
    for path in scores.keys() & others.keys():
        assert scores[path] == pytest.approx(others[path], abs=rounding)
    edge = max(min(scores.values()), min(others.values())) + rounding
    assert all(scores[path] <= edge for path in scores.keys() - others.keys())
    assert all(others[path] <= edge for path in others.keys() - scores.keys())
    assert len(scores.keys() & others.keys()) > len(scores) / 2


def test_a_searched_node_that_the_target_chose_is_not_read_again(engine: Engine) -> None:
    """A tree that is searched far wider than it may be sent: its bonus tokens are often known."""
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    policy = tree_policy("eagle2")
    config = CONFIGS[0]
    ranking = policy.ranking(config, GumbelNoise(0, 49152))
    text = engine.encoder.encode(PROMPT)
    limits = policy.clamp(engine.speculator.sizer.limits())
    tree = drafter.draft(text, limits, ranking)
    steps = drafter.steps
    searched = [node for node in range(1, len(tree)) if tree.depths[node] == 1]
    chosen = int(tree.tokens[searched[0]])
    again = drafter.draft([*text, chosen], limits, ranking)
    reused = drafter.steps
    drafter.forget()
    fresh = drafter.draft([*text, chosen], limits, ranking)
    assert reused < drafter.steps <= steps + 1
    assert_same_but_for_rounding(again, fresh)


def test_what_was_learned_is_kept_for_the_pair(smol_path: Path, q4_drafter_path: Path) -> None:
    for _ in range(2):
        with edgespec.load(smol_path, draft=q4_drafter_path, tree_budget=16, context=256) as engine:
            acceptance = engine.speculator.policy.greedy.acceptance
            assert isinstance(acceptance, CalibratedAcceptance)
            learned, nats = acceptance._counts.tried.sum(), acceptance.calibration.nats
            engine.generate(PROMPT, GenerationConfig(max_tokens=24))
    assert learned > 20
    assert nats != DrafterCalibration().nats
    (path,) = (cache_folder() / "acceptance").iterdir()
    assert path.stat().st_size < 100_000


def test_wishes_that_make_no_sense_are_explained(smol_path: Path, q4_drafter_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^tree must be .*, not 'bushy'\."):
        edgespec.load(smol_path, tree="bushy")
    with pytest.raises(UsageError, match=r"^tree_depth must be .*, not 0\."):
        edgespec.load(smol_path, tree_depth=0)
    with pytest.raises(UsageError, match=r"^tree_width must be .*, not 5000\."):
        edgespec.load(smol_path, tree_width=5000)
    with pytest.raises(UsageError, match=r"^drafter='merged' needs a model"):
        edgespec.load(smol_path, draft="none", drafter="merged")
    with pytest.raises(UsageError, match=r"^drafter must be .*, not 'both'\.") as error:
        edgespec.load(smol_path, draft=q4_drafter_path, drafter="both")
    assert str(error.value).startswith("drafter must be model, lookup or merged, not ")
