"""Tree sizes on simulated machines: what a node costs, and how often the drafter is right."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import RoundCosts
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.sizing.running_costs import OnlineCostCurve
from edgespec.speculation.sizing.sizers import AdaptiveSizer, FixedSizer, PassRoom, fixed_nodes
from edgespec.speculation.tree_search import grow
from tests.tiers import slow_except

Cost = Callable[[int], float]

_MOST = TreeLimits(budget=128, depth=16, leaves=40, width=5, branching=6)
_SURE = (0.7, 0.11, 0.05, 0.03, 0.02)  # chances of a drafter's first, second, ... candidate
_UNSURE = (0.25, 0.1, 0.05)


def _flat(nodes: int) -> float:
    return 1.0


def _sloped(nodes: int) -> float:
    return 1 + 0.02 * nodes


def _steep(nodes: int) -> float:
    return 0.2 + 0.8 * nodes


class _Tree:
    """The best nodes below a text where every text has the same chances: any smaller tree is a part."""

    def __init__(self, chances: tuple[float, ...]) -> None:
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.children: dict[tuple[int, int], int] = {}
        heap = [(0.0, 0, -1, 0)]
        while len(self.scores) < _MOST.budget:
            cost, depth, parent, rank = heapq.heappop(heap)
            node = len(self.scores)
            self.scores.append(-cost)
            self.depths.append(depth)
            self.children[parent, rank] = node
            if depth < _MOST.depth:
                for child, chance in enumerate(chances):
                    heapq.heappush(heap, (cost - math.log(chance), depth + 1, node, child))
        self.bounds = np.cumsum(chances)

    def size(self, limits: TreeLimits) -> int:
        good = sum(score > limits.min_logprob for score in self.scores)
        return max(min(good, limits.budget), 1)

    def accepted(self, nodes: int, right: float, rng: np.random.Generator) -> int:
        """Tokens accepted where the drafter is right `right` times as often as it says."""
        node, count = 0, 0
        while True:
            rank = int(np.searchsorted(right * self.bounds, rng.random()))
            child = self.children.get((node, rank), nodes)
            if child >= nodes:
                return count
            node, count = child, count + 1


_tree = cache(_Tree)


@dataclass
class _Machine:
    """A target whose pass over n nodes takes cost(n) plain passes, and a drafter.

    The first pass over any number of nodes takes `setup_s` more.
    """

    cost: Cost
    chances: tuple[float, ...] = _SURE
    right: float = 1.0
    step_s: float = 0.0
    tells: bool = True
    setup_s: float = 0.0

    def decode(self, sizer: AdaptiveSizer, passes: int, seed: int = 0, texts: int = 1) -> list[PassRecord]:
        """Passes of one text, or of several with trees alike; the records are of all of them together."""
        rng = np.random.default_rng(seed)
        tree = _tree(self.chances)
        records: list[PassRecord] = []
        for _ in range(passes):
            limits = sizer.limits() if texts == 1 else sizer.limits(texts, PassRoom(_MOST.budget))
            each = tree.size(replace(limits, budget=limits.budget // texts))
            nodes = texts * each
            # A step even where it finds nothing good enough, and one for every further layer.
            steps = max(tree.depths[:each]) or int(limits.budget > texts)
            disturbed = 1 + 0.05 * rng.exponential()
            setup_s = 0.0 if nodes in {r.nodes for r in records} else self.setup_s
            record = PassRecord(
                nodes=nodes,
                accepted=sum(tree.accepted(each, self.right, rng) for _ in range(texts)),
                draft_s=self.step_s * steps,
                verify_s=self.cost(nodes) * disturbed + setup_s,
                setup_s=setup_s,
                accept_s=0.0,
                expected_accepted=texts * sum(math.exp(s) for s in tree.scores[1:each])
                if self.tells
                else 0.0,
            )
            sizer.record(record, texts)
            records.append(record)
        return records

    def best(self) -> float:
        """Seconds a token with the best fixed size, against plain decoding."""
        rng = np.random.default_rng(1)
        tree = _tree(self.chances)
        sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]
        return min(
            (self.cost(n) + self.step_s * max(tree.depths[:n]))
            / (1 + np.mean([tree.accepted(n, self.right, rng) for _ in range(200)]))
            for n in sizes
        ) / self.cost(1)


def _pace(records: list[PassRecord], machine: _Machine, texts: int = 1) -> float:
    """Seconds a token, against plain decoding on the machine (which is disturbed by 5 % too)."""
    tokens = sum(r.accepted + texts for r in records)
    return sum(r.seconds for r in records) / tokens / (1.05 * machine.cost(texts) / texts)


def test_a_fixed_budget_stays_as_it_is() -> None:
    sizer = FixedSizer(_MOST)
    for nodes in (1, 5, 128):
        sizer.record(PassRecord(nodes, 0, 9.0, 9.0, 9.0))
        assert sizer.limits() is _MOST


@pytest.mark.parametrize("seed", range(3))
def test_where_nodes_cost_nothing_trees_grow_to_the_full_budget(seed: int) -> None:
    records = _Machine(_flat).decode(AdaptiveSizer(_MOST), 200, seed)
    assert np.median([r.nodes for r in records[50:]]) == _MOST.budget
    assert _pace(records, _Machine(_flat)) < 0.3


@pytest.mark.parametrize("chances", [_SURE, _UNSURE])
@pytest.mark.parametrize("seed", range(3))
def test_where_every_node_costs_a_pass_decoding_is_plain(chances: tuple[float, ...], seed: int) -> None:
    machine = _Machine(_steep, chances)
    records = machine.decode(AdaptiveSizer(_MOST), 500, seed)
    assert np.mean([r.nodes == 1 for r in records]) > 0.9
    assert _pace(records, machine) < 1.06


# Every mixture of machine and drafter: never much slower than plain, and not far from the best size.
_MACHINES = [
    _Machine(cost, chances, right, step_s)
    for cost in (_flat, _sloped, lambda n: 1 + 0.5 * math.ceil(n / 8), lambda n: max(1.0, n / 32))
    for chances, right in ((_SURE, 1.0), (_SURE, 0.4), (_SURE, 0.05), (_UNSURE, 1.0))
    for step_s in (0.0, 0.02, 0.3)
]


@pytest.mark.parametrize("machine", _MACHINES)
def test_no_machine_is_much_slower_than_with_the_best_size(machine: _Machine) -> None:
    pace = _pace(machine.decode(AdaptiveSizer(_MOST), 500), machine)
    assert pace < 1.05
    assert pace < 1.2 * machine.best() + 0.02


@pytest.mark.parametrize("machine", _MACHINES)
@pytest.mark.parametrize("texts", slow_except([5], [2, 5, 16]))
def test_several_texts_are_never_much_slower_than_without_drafts(machine: _Machine, texts: int) -> None:
    assert _pace(machine.decode(AdaptiveSizer(_MOST), 500, texts=texts), machine, texts) < 1.05


@pytest.mark.parametrize("texts", [2, 5, 16])
def test_several_texts_share_nodes_that_cost_nothing(texts: int) -> None:
    records = _Machine(_flat).decode(AdaptiveSizer(_MOST), 200, texts=texts)
    assert np.median([r.nodes for r in records[50:]]) == _MOST.budget // texts * texts
    assert _pace(records, _Machine(_flat), texts) < 0.55


def test_texts_that_share_a_pass_with_prompts_have_less_room() -> None:
    sizer = AdaptiveSizer(
        replace(_MOST, row_multiple=4, free_nodes=8), RoundCosts(Curve.through([(1, 1.0), (128, 1.0)]))
    )
    assert sizer.limits(3, PassRoom(20, 44)).budget == 20
    assert sizer.limits(3, PassRoom(20, 44)).row_multiple == 1, "rows that are read fill the padding"
    assert sizer.limits(3, PassRoom(2, 62)).budget == 3, "every text has a row"


@pytest.mark.parametrize("cost", [_flat, _sloped])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_becomes_useful_is_noticed(cost: Cost, seed: int) -> None:
    sizer = AdaptiveSizer(_MOST)
    useless = _Machine(cost, right=0.02, step_s=0.05)
    assert _pace(useless.decode(sizer, 1500, seed), useless) < 1.06
    useful = _Machine(cost, step_s=0.02)
    records = useful.decode(sizer, 500, seed)
    assert _pace(records[300:], useful) < 1.15 * useful.best()


@pytest.mark.parametrize("cost", [_flat, _sloped])
def test_a_drafter_that_becomes_useless_is_left_alone(cost: Cost) -> None:
    sizer = AdaptiveSizer(_MOST)
    useful = _Machine(cost, step_s=0.05)
    assert _pace(useful.decode(sizer, 200), useful) < 0.6
    useless = _Machine(cost, right=0.02, step_s=0.05)
    assert _pace(useless.decode(sizer, 300), useless) < 1.12
    assert np.mean([r.nodes == 1 for r in useless.decode(sizer, 300)]) > 0.9


@pytest.mark.parametrize("right", [0.02, 1.0])
def test_drafters_that_promise_nothing_are_judged_by_their_yield(right: float) -> None:
    machine = _Machine(_sloped, right=right, step_s=0.05, tells=False)
    pace = _pace(machine.decode(AdaptiveSizer(_MOST), 500), machine)
    assert pace < (1.06 if right < 1 else 0.5)


def test_the_first_pass_is_plain_and_the_second_a_small_tree() -> None:
    sizer = AdaptiveSizer(_MOST)
    assert sizer.limits().budget == 1
    sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))
    assert sizer.limits() == TreeLimits(16, 16, 40, 5, 6, -math.inf)
    sizer.record(PassRecord(16, 2, 0.0, 1.0, 0.0))
    assert sizer.limits().budget == _MOST.budget


def test_other_limits_are_passed_on_and_the_budget_is_never_exceeded() -> None:
    most = TreeLimits(budget=5, depth=3, leaves=2, width=1, branching=1)
    sizer = AdaptiveSizer(most)
    tree = _tree(_SURE)
    for _ in range(50):
        limits = sizer.limits()
        assert limits.budget in (1, 5)
        assert (limits.depth, limits.leaves, limits.width, limits.branching) == (3, 2, 1, 1)
        sizer.record(PassRecord(tree.size(limits), 1, 0.0, 1.0, 0.0))


def test_a_drafter_that_finds_nothing_at_no_cost_is_always_asked() -> None:
    sizer = AdaptiveSizer(_MOST)
    for _ in range(500):
        sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))
        assert sizer.limits().budget > 1


@pytest.mark.parametrize(("draft_s", "observe_s"), [(0.1, 0.0), (0.05, 0.05)])
def test_a_drafter_that_takes_its_time_to_find_nothing_is_not_asked_for_long(
    draft_s: float, observe_s: float
) -> None:
    sizer = AdaptiveSizer(_MOST)
    passes, asked = 500, 0
    for _ in range(passes):
        is_asked = sizer.limits().budget > 1
        asked += is_asked
        sizer.record(
            PassRecord(1, 0, draft_s, 1.0, observe_s, observe_s=observe_s)
            if is_asked
            else PassRecord(1, 0, 0.0, 1.0, 0.0)
        )
    assert asked / passes < 0.25, "a tenth of a pass each, and a fortieth of all passes in all"


def test_a_draft_step_must_be_worth_its_seconds() -> None:
    sizer = AdaptiveSizer(_MOST)
    sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))
    for nodes in (16, 17, 18):
        sizer.record(PassRecord(nodes, 1, 0.8, 1.0, 0.0, expected_accepted=1.0, draft_steps=4))
    assert sizer.limits().min_gain == pytest.approx(0.2, rel=0.02)
    assert sizer.limits().min_logprob < -10, "what steps cost is not charged to nodes again"


def test_reading_the_prompt_is_no_price_of_a_draft_step() -> None:
    sizer = AdaptiveSizer(_MOST)
    sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))
    for draft_s in (9.0, 0.4, 0.4):
        sizer.record(PassRecord(16, 3, draft_s, 1.0, 0.0, expected_accepted=3.0, draft_steps=4))
    sizer.record(PassRecord(17, 3, 0.4, 1.0, 0.0, expected_accepted=3.0, draft_steps=4))
    assert sizer.limits().min_gain == pytest.approx(0.1, rel=0.3)


def _drafted(draft_s: float, read_s: float, wait_s: float) -> PassRecord:
    return PassRecord(
        16, 3, draft_s, 1.0, 0.0, wait_s=wait_s, draft_read_s=read_s, expected_accepted=3.0, draft_steps=4
    )


@pytest.mark.parametrize(
    ("read_s", "wait_s", "hidden_s"),
    [
        (0.2, 0.5, 0.2),  # the ring was full before the draft ended
        (0.0, 0.5, 0.0),  # it was full all the time
        (0.2, 0.0, 0.0),  # the pass is bound by arithmetic, and nothing is waited for
        (0.4, 0.5, 0.48),  # the disk was still reading: it may read on for a little
    ],
)
def test_draft_steps_cost_nothing_while_the_disk_reads_for_the_pass(
    read_s: float, wait_s: float, hidden_s: float
) -> None:
    sizer = AdaptiveSizer(_MOST, RoundCosts(Curve.through([(1, 1.0), (128, 1.0)]), step_s=0.1))
    for _ in range(40):
        sizer.record(_drafted(0.4, read_s, wait_s))
    limits = sizer.limits()
    assert limits.overlap_budget == pytest.approx(hidden_s / 0.1 * limits.min_gain, rel=0.05, abs=1e-3)


def _share_drafted(passes: int, **machine: float) -> float:
    """The share of passes with drafts, where rows cost time from the second on, and costs are known."""
    curve = Curve.through([(1, 1.0), (8, 2.2), (32, 6.0), (64, 13.0)])
    made = _Machine(curve.at, step_s=0.1, **machine)  # type: ignore[arg-type]
    records = [
        record
        for seed in range(24)
        for record in made.decode(AdaptiveSizer(_MOST, RoundCosts(curve, step_s=0.1)), passes, seed)
    ]
    return float(np.mean([record.nodes > 1 for record in records]))


def test_what_is_needed_once_for_a_number_of_rows_does_not_end_drafting() -> None:
    """As on workers behind a slow network, which are asked about memory when a tree has a new size."""
    assert _share_drafted(100, setup_s=1.5) > 0.6


def test_a_drafter_that_promises_too_much_is_used_where_small_trees_pay() -> None:
    """A first large tree that fails must not end what smaller ones would yield."""
    assert _share_drafted(140, right=0.8) > 0.65


def test_the_first_step_is_always_taken() -> None:
    sizer = AdaptiveSizer(_MOST, RoundCosts(Curve.through([(1, 1.0), (16, 1.1)]), step_s=0.5))
    # Tokens that were promised and not accepted: a step is believed to be worth less than it costs.
    sizer.record(PassRecord(2, 0, 0.5, 1.0, 0.0, expected_accepted=2.0, draft_steps=1))
    assert sizer.limits().budget > 1
    assert 0 < sizer.limits().min_gain < 1


@pytest.mark.parametrize("step_s", [0.9, 45.0])
def test_a_drafter_whose_steps_cannot_pay_is_never_asked(step_s: float) -> None:
    curve = Curve.through([(1, 1.0), (8, 1.2), (32, 3.0)])
    sizer = AdaptiveSizer(_MOST, RoundCosts(curve, step_s))
    for _ in range(500):
        assert sizer.limits().budget == 1
        sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))


def test_the_first_tree_takes_a_single_step_where_steps_cost_time() -> None:
    sizer = AdaptiveSizer(_MOST, RoundCosts(Curve.through([(1, 1.0), (8, 1.2), (32, 3.0)]), step_s=0.45))
    limits = sizer.limits()
    assert limits.loss_budget < 2 * limits.min_gain
    for _ in range(8):
        sizer.record(PassRecord(8, 7, 3.15, 1.2, 0.0, expected_accepted=7.0, draft_steps=7))
    limits = sizer.limits()
    assert limits.loss_budget > 4 * limits.min_gain, "what was gained may be risked"


def test_drafting_rests_once_its_stake_is_lost_and_soon_tries_again() -> None:
    sizer = AdaptiveSizer(_MOST, RoundCosts(Curve.through([(1, 1.0), (8, 1.2), (32, 3.0)]), step_s=0.45))
    lost_s, asked = 0.0, []
    for number in range(1000):
        if sizer.limits().budget == 1:
            sizer.record(PassRecord(1, 0, 0.0, 1.0, 0.0))
        else:
            sizer.record(PassRecord(2, 0, 0.45, 1.03, 0.0, expected_accepted=0.7, draft_steps=1))
            lost_s += 0.48
            asked.append(number)
    assert lost_s < 2 + 0.015 * 1000
    assert max(asked) > 900
    assert asked[:3] == [0, 1, 2]
    assert asked[3] > 10


def _failed(draft_s: float = 0.45, verify_s: float = 1.03, draft_text_s: float = 0.0) -> PassRecord:
    return PassRecord(
        2, 0, draft_s, verify_s, 0.0, expected_accepted=0.7, draft_steps=1, draft_text_s=draft_text_s
    )


def _plain_after(*records: PassRecord, plain_s: float = 1.0) -> int:
    """Plain passes of so many seconds after these until a tree is drafted again."""
    costs = RoundCosts(Curve.through([(1, 1.0), (8, 1.2), (32, 3.0)]), step_s=0.45)
    sizer = AdaptiveSizer(_MOST, costs)
    for record in records:
        sizer.record(record)
    plain = 0
    while sizer.limits().budget == 1:
        sizer.record(PassRecord(1, 0, 0.0, plain_s, 0.0))
        plain += 1
    return plain


def test_a_pass_that_another_program_slowed_down_does_not_end_drafting() -> None:
    usual = PassRecord(2, 1, 0.45, 1.03, 0.0, expected_accepted=0.7, draft_steps=1)
    assert _plain_after(usual, _failed(verify_s=2.5)) <= 1
    assert _plain_after(usual, _failed(verify_s=2.5), _failed(verify_s=2.5)) > 10, "it is no accident"


def test_a_machine_that_became_slower_does_not_end_drafting() -> None:
    kept = PassRecord(2, 1, 0.45, 1.6, 0.0, expected_accepted=0.7, draft_steps=1)
    slow = 2 * [kept, _failed(verify_s=1.6)]
    assert _plain_after(*slow, plain_s=1.55) == 1, "a plain pass shows that all passes are slow"
    assert _plain_after(*slow, plain_s=1.0) > 10, "only those with trees are"


def test_reading_the_prompt_does_not_end_drafting() -> None:
    assert _plain_after(_failed(draft_s=9.0, draft_text_s=8.0), _failed()) == _plain_after(
        _failed(), _failed()
    )


def test_what_is_known_of_the_machine_sizes_the_first_tree() -> None:
    curve = Curve.through([(1, 1.0), (16, 1.0), (32, 1.0), (64, 3.0)])
    sizer = AdaptiveSizer(_MOST, RoundCosts(curve, step_s=0.1))
    limits = sizer.limits()
    assert 32 < limits.budget < 40, "no single tree may cost much before several were seen"
    assert limits.free_nodes == 32 + int(0.05 / (2 / 32)), "up to the knee nodes are free"
    assert 2 / 32 < math.exp(limits.min_logprob) < 0.5, "beyond it they cost, and tokens are worth less"
    assert limits.min_gain == pytest.approx(0.1 / (2 / 32) * math.exp(limits.min_logprob))
    for _ in range(4):
        sizer.record(PassRecord(36, 4, 0.1, 1.25, 0.0, expected_accepted=4.0, draft_steps=1))
    assert sizer.limits().budget > limits.budget + 16, "what was gained may be risked"


def test_a_known_cost_that_was_wrong_is_corrected() -> None:
    believed = Curve.through([(1, 1.0), (128, 1.0)])
    machine = _Machine(_steep, _UNSURE)
    sizer = AdaptiveSizer(_MOST, RoundCosts(believed))
    machine.decode(sizer, 300)
    records = machine.decode(sizer, 200)
    assert _pace(records, machine) < 1.04


def test_large_trees_teach_nothing_wrong_about_small_ones() -> None:
    """A quick measurement ends at 56 rows; what larger trees take is extrapolated, and corrected by them."""
    quick = Curve.through([(1, 1.0), (8, 1.0), (32, 1.0), (56, 1.3)])
    cost = OnlineCostCurve(RoundCosts(quick), 128)
    for _ in range(60):
        cost.add(128, 6.0)
    assert cost.nodes_within(1, 0.3) == 56
    assert cost.slope is not None
    assert cost.slope > (6.0 - 1.3) / 128


def test_the_first_large_pass_shows_most_of_what_its_rows_cost() -> None:
    """A streamed answer may end after six passes, so its sizes cannot wait for many of them."""
    cost = OnlineCostCurve(RoundCosts(Curve.through([(1, 2.2), (16, 2.2), (64, 2.25)])), 88)
    cost.add(88, 3.6)
    assert cost.slope is not None
    assert cost.slope > 0.5 * (3.6 - 2.2) / (88 - 16)
    cost.add(88, 3.6)
    assert cost.free < 66


@pytest.mark.parametrize("passes", [60, 300, 1000])
@pytest.mark.parametrize("right", [0.0, 0.1])
def test_trying_a_useless_drafter_costs_little_however_short_the_answer(passes: int, right: float) -> None:
    costs = RoundCosts(Curve.through([(n, _sloped(n)) for n in (1, 16, 64, 128)]), step_s=0.1)
    machine = _Machine(_sloped, right=right, step_s=0.1)
    pace = np.mean([_pace(machine.decode(AdaptiveSizer(_MOST, costs), passes, s), machine) for s in range(5)])
    assert pace < 1.03 + 2.0 / passes


class _Steps:
    """A drafter that is asked by the real builder, on a machine where its steps cost."""

    def __init__(self, step_s: float, chances: tuple[float, ...] = _SURE) -> None:
        self.step_s, self.steps = step_s, 0
        self._logprobs = np.log(np.array(chances, dtype=np.float32))

    def expand(self, frontier: Frontier) -> Children:
        self.steps += 1
        shape = (len(frontier.nodes), 1)
        tokens = np.tile(np.arange(len(self._logprobs), dtype=np.int32), shape)
        return Children(tokens, np.tile(self._logprobs, shape))

    def round(self, limits: TreeLimits, rng: np.random.Generator) -> PassRecord:
        self.steps = 0
        tree = grow(0, self.expand, limits)
        bounds = np.cumsum(np.exp(self._logprobs))
        node, accepted = 0, 0
        while (below := tree.child(node, int(np.searchsorted(bounds, rng.random())))) is not None:
            node, accepted = below, accepted + 1
        disturbed = 1 + 0.05 * rng.exponential()
        return PassRecord(
            nodes=len(tree),
            accepted=accepted,
            draft_s=self.step_s * self.steps,
            verify_s=_sloped(len(tree)) * disturbed,
            accept_s=0.0,
            expected_accepted=tree.expected_accepted,
            draft_steps=self.steps,
        )


@pytest.mark.parametrize("step_s", slow_except([0.1], [0.01, 0.1, 0.3]))
def test_depth_follows_from_what_a_step_costs(step_s: float) -> None:
    rng = np.random.default_rng(0)

    def pace(limits: Callable[[], TreeLimits], record: Callable[[PassRecord], None]) -> float:
        records = []
        for _ in range(400):
            records.append(drafter.round(limits(), rng))
            record(records[-1])
        return sum(r.seconds for r in records) / sum(r.accepted + 1 for r in records)

    drafter = _Steps(step_s)
    sizer = AdaptiveSizer(_MOST)
    adapted = pace(sizer.limits, sizer.record)
    best = math.inf
    for budget, depth in itertools.product((1, 4, 8, 16, 32), (1, 2, 4, 8)):
        fixed = FixedSizer(replace(_MOST, budget=budget, depth=depth))
        best = min(best, pace(fixed.limits, fixed.record))
    assert adapted < 1.12 * best + 0.02


STREAMED = RoundCosts(Curve((1, 64, 128), (2.0, 2.0, 4.0)), step_s=0.01, row_s=0.001)
IN_MEMORY = RoundCosts(Curve((1, 16, 64), (0.05, 0.1, 0.3)), step_s=0.01, row_s=0.001)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("costs", [None, IN_MEMORY])
def test_trees_that_keep_their_size_have_the_usual_one_where_rows_cost_time(
    costs: RoundCosts | None, chain: bool
) -> None:
    assert fixed_nodes(16, costs, TreeLimits(64), chain=chain) == 16
    assert fixed_nodes(16, costs, TreeLimits(4), chain=chain) == 4, "a tree budget"


def test_trees_that_keep_their_size_take_the_rows_that_are_free() -> None:
    most = TreeLimits(64, depth=64)
    assert fixed_nodes(16, STREAMED, most, chain=False) > 32
    chain = fixed_nodes(8, STREAMED, most, chain=True)
    assert 8 < chain < 32, "each node of a chain takes a draft step"
    slow = replace(STREAMED, step_s=1.0)
    assert fixed_nodes(8, slow, most, chain=True) == 8


@given(st.integers(2, 256), st.floats(0.0, 1.0), st.booleans())
def test_trees_that_keep_their_size_keep_to_the_limits(budget: int, step_s: float, chain: bool) -> None:
    costs = replace(STREAMED, step_s=step_s)
    assert 1 < fixed_nodes(16, costs, TreeLimits(budget, depth=budget), chain=chain) <= budget


def test_a_disk_that_was_believed_slow_is_corrected_by_trees_alone() -> None:
    """No plain pass is needed to see that reading takes less than it did beforehand."""
    costs = RoundCosts(Curve.through([(1, 0.2), (128, 2.2)]), step_s=0.01, read_s=9.0, overlap=4.0)
    cost = OnlineCostCurve(costs, 96)
    assert cost.free >= 96
    for _ in range(6):
        cost.add(96, 1.8, wait_s=0.05)
    assert cost.expected(1) < 2.2
    for _ in range(6):
        cost.add(40, 1.3, wait_s=0.5)
    assert cost.expected(1) == pytest.approx(1.3, rel=0.1)
    assert cost.expected(96) == pytest.approx(1.8, rel=0.1)
