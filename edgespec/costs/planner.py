"""The planner: the speed of a target with each way to hold its weights and to draft for it.

The time of a round comes from `pass_time`, and the tokens of a pass from measurements of this pair's trees
(`yields`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.yields import BUDGETS, TreeYields

Bound = Literal["disk", "compute", "drafter"]


@dataclass(frozen=True)
class TargetPasses:
    """The time of the target's passes.

    Attributes:
        compute: seconds of arithmetic, by rows.
        read_rate: bytes of weights that arrive per second; 0 if unknown.
        accept_s: seconds of a round outside draft and pass.
        overlap: how well the longer of reading and arithmetic hides the other; see `pass_time.pass_seconds`.
        measured: whether the figures are this model's own, not derived from another's.
    """

    compute: Curve
    read_rate: float = 0.0
    accept_s: float = 0.0
    overlap: float = math.inf
    measured: bool = True


@dataclass(frozen=True)
class DraftingCosts:
    """The yields and costs of a drafter.

    Attributes:
        name: the drafter's; "none" for plain decoding.
        yields: tokens per pass and draft steps, by size of tree; None without a drafter.
        step: seconds of a draft step, by rows; None where a step costs next to nothing.
        overhead: seconds to grow a tree, relative to those of its steps.
        width: most rows in a step.
        source: where the yields come from, in words.
        measured: whether the figures are this pair's own.
    """

    name: str
    yields: TreeYields | None = None
    step: Curve | None = None
    overhead: float = 1.0
    width: int = 8
    source: str = ""
    measured: bool = True

    def seconds(self, nodes: int) -> float:
        """Seconds to grow a tree of this many nodes."""
        if self.yields is None or self.step is None or nodes < 2:
            return 0.0
        steps, rows = self.yields.steps_at(nodes), self.yields.rows_at(nodes)
        return draft_seconds(self.step, steps, rows, self.width) * self.overhead


@dataclass(frozen=True)
class Prediction:
    """One way to run, and the speed expected of it.

    Attributes:
        pass_s, draft_s: seconds of a pass and of a draft.
        read_s, compute_s: seconds of reading and of arithmetic in a pass.
        bound: what most of the time is spent on.
    """

    holding: PlannedWeights
    drafter: str
    nodes: int
    tokens_per_pass: float
    pass_s: float
    draft_s: float
    read_s: float
    compute_s: float
    round_s: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation."""
        return self.tokens_per_pass / self.round_s

    @property
    def bound(self) -> Bound:
        """The part of a round that takes most of the time."""
        if self.draft_s > self.pass_s:
            return "drafter"
        return "disk" if self.read_s > self.compute_s else "compute"

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "drafter": self.drafter,
            "tree_budget": self.nodes,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "pass_s": round(self.pass_s, 5),
            "draft_s": round(self.draft_s, 5),
            "read_s": round(self.read_s, 5),
            "compute_s": round(self.compute_s, 5),
            "bound": self.bound,
            "memory_bytes": self.holding.budget,
            "needed_bytes": self.holding.needed,
            "resident_bytes": self.holding.resident_bytes,
            "streamed_bytes_per_pass": self.holding.streamed_bytes,
            "slots": self.holding.n_slots,
            "experts": self._experts(),
        }

    def _experts(self) -> dict[str, Any] | None:
        experts = self.holding.experts
        if experts is None:
            return None
        return {
            "slots": experts.n_slots,
            "experts": experts.n_experts,
            "needed_per_token": experts.n_needed,
            "hit_rate": round(experts.hit_rate, 4),
            "hit_rate_measured": experts.measured,
        }


def predict(holding: PlannedWeights, passes: TargetPasses, drafting: DraftingCosts, nodes: int) -> Prediction:
    """The speed with trees of this many nodes; one node is plain decoding."""
    draft_s = drafting.seconds(nodes)
    compute_s = passes.compute.at(nodes)
    read_s = read_seconds(
        holding.pass_bytes(nodes),
        passes.read_rate,
        ring_bytes=holding.n_slots * holding.slot_bytes,
        drafting_s=draft_s,
    )
    pass_s = pass_seconds(read_s, compute_s, passes.overlap)
    tokens = drafting.yields.at(nodes) if drafting.yields is not None else 1.0
    return Prediction(
        holding=holding,
        drafter=drafting.name,
        nodes=nodes,
        tokens_per_pass=tokens,
        pass_s=pass_s,
        draft_s=draft_s,
        read_s=read_s,
        compute_s=compute_s,
        round_s=round_seconds(draft_s, pass_s, passes.accept_s),
    )


def alternatives(
    holding: PlannedWeights,
    passes: TargetPasses,
    drafting: DraftingCosts,
    most: int,
    budgets: Sequence[int] = BUDGETS,
) -> list[Prediction]:
    """A prediction for every tree size up to `most` nodes, plain decoding first."""
    limit = 1 if drafting.yields is None else min(most, max(drafting.yields.tokens))
    return [predict(holding, passes, drafting, nodes) for nodes in budgets if nodes <= limit]


def best(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest prediction; of several that are as fast, the first.

    Raises:
        ValueError: there are no predictions.
    """
    chosen = max(predictions, key=lambda prediction: prediction.tokens_per_second, default=None)
    if chosen is None:
        raise ValueError("there is nothing to choose from")
    return chosen


@dataclass(frozen=True)
class PlanComparison:
    """Every way to run that was compared: the choice and all tables of a plan are read off this one list.

    Attributes:
        plain: plain decoding.
        trees: for each drafter, every tree size with it.
    """

    plain: Prediction
    trees: tuple[tuple[Prediction, ...], ...] = ()

    @property
    def all(self) -> list[Prediction]:
        """All predictions, plain decoding first."""
        return [self.plain, *(size for sizes in self.trees for size in sizes)]

    @property
    def by_drafter(self) -> list[Prediction]:
        """Plain decoding, and the fastest tree of each drafter: the fastest first."""
        rows = [self.plain, *(best(sizes) for sizes in self.trees if sizes)]
        return sorted(rows, key=lambda row: -row.tokens_per_second)

    @property
    def fastest(self) -> Prediction:
        """The fastest of all."""
        return self.by_drafter[0]

    @property
    def gain(self) -> float:
        """The speed of the fastest, in times that of plain decoding."""
        return self.fastest.tokens_per_second / self.plain.tokens_per_second

    def beside(self, row: Prediction) -> list[Prediction]:
        """Plain decoding, and every tree size with the drafter of a row."""
        sizes = next((sizes for sizes in self.trees if any(size is row for size in sizes)), ())
        return [self.plain, *sizes]


@dataclass(frozen=True)
class Advice:
    """A change, and how much faster the best plan would be with it: 0.6 means 60 %."""

    what: str
    gain: float

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {"what": self.what, "gain": round(self.gain, 3)}


def advise(
    chosen: Prediction,
    passes: TargetPasses,
    drafting: DraftingCosts,
    most: int,
    more_memory: Sequence[tuple[str, PlannedWeights]] = (),
) -> list[Advice]:
    """The changes that would help most, best first; a gain of less than 5 % is left out.

    Args:
        more_memory: plans for larger budgets, each with its description.
    """

    def speed(holding: PlannedWeights, passes: TargetPasses, drafting: DraftingCosts) -> float:
        return best(alternatives(holding, passes, drafting, most)).tokens_per_second

    holding = chosen.holding
    tried = [(name, speed(other, passes, drafting)) for name, other in more_memory]
    quick = drafting
    if drafting.step is not None:
        quick = replace(drafting, step=drafting.step.scaled(0.5))
        tried.append(("a drafter half as large that agrees as often", speed(holding, passes, quick)))
    faster = replace(passes, compute=passes.compute.scaled(0.5))
    tried.append(("twice the processor", speed(holding, faster, quick)))
    if holding.streamed_bytes and passes.read_rate:
        quicker = replace(passes, read_rate=2 * passes.read_rate)
        tried.append(("a disk twice as fast", speed(holding, quicker, drafting)))
    advice = [Advice(what, there / chosen.tokens_per_second - 1) for what, there in tried]
    return sorted((a for a in advice if a.gain >= 0.05), key=lambda a: -a.gain)
