"""The planner: the speed of a target with each way to hold its weights and to draft for it.

The time of a round comes from `pass_time`, and the tokens of a pass from measurements of this pair's trees
(`yields`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.yields import BUDGETS, TreeYields

Resource = Literal["disk", "compute", "drafter"]

USUAL_OVERHEAD = 1.1  # of growing a tree, over its draft steps, where it was not measured


@dataclass(frozen=True)
class TargetPasses:
    """The time of the target's passes."""

    compute: Curve  # seconds of arithmetic, by rows
    read_rate: float = 0.0  # bytes of weights that arrive per second; 0 if unknown
    accept_s: float = 0.0  # seconds of a round outside draft and pass
    # how well the longer of reading and arithmetic hides the other; see `pass_time.pass_seconds`
    overlap: float = math.inf
    measured: bool = True  # whether the figures are this model's own, not derived from another's

    def seconds(self, holding: PlannedWeights, read_s: float, compute_s: float) -> float:
        """Seconds of a pass from those of its reading and of its arithmetic."""
        # A layer's experts are known only when they are needed, so nothing hides their reading.
        return pass_seconds(read_s, compute_s, self.overlap if holding.experts is None else 1.0)


@dataclass(frozen=True)
class DraftingCosts:
    """The yields and costs of a drafter."""

    name: str  # the drafter's; "none" for plain decoding
    # tokens per pass and draft steps, by size of tree; None without a drafter
    yields: TreeYields | None = None
    step: Curve | None = None  # seconds of a draft step, by rows; None where a step costs next to nothing
    overhead: float = 1.0  # seconds to grow a tree, relative to those of its steps
    width: int = 8  # most rows in a step
    source: str = ""  # where the yields come from, in words
    measured: bool = True  # whether the figures are this pair's own

    def seconds(self, nodes: int) -> float:
        """Seconds to grow a tree of this many nodes."""
        if self.yields is None or self.step is None or nodes < 2:
            return 0.0
        steps, rows = self.yields.steps_at(nodes), self.yields.rows_at(nodes)
        return draft_seconds(self.step, steps, rows, self.width) * self.overhead


@dataclass(frozen=True)
class Prediction:
    """One way to run, and the speed expected of it."""

    holding: PlannedWeights
    drafter: str
    nodes: int
    tokens_per_pass: float
    # seconds of a pass and of a draft
    pass_s: float
    draft_s: float
    # seconds of reading and of arithmetic in a pass
    read_s: float
    compute_s: float
    round_s: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation."""
        return self.tokens_per_pass / self.round_s

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "tree_budget": self.nodes,
            "tokens_per_second": round(self.tokens_per_second, 6),
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "pass_s": round(self.pass_s, 5),
            "draft_s": round(self.draft_s, 5),
            "read_s": round(self.read_s, 5),
            "compute_s": round(self.compute_s, 5),
            "bound": self._longest_part,
            "memory_bytes": self.holding.budget,
            "needed_bytes": self.holding.needed,
            "resident_bytes": self.holding.resident_bytes,
            "streamed_bytes_per_pass": self.holding.streamed_bytes,
            "slots": self.holding.n_slots,
            "experts": self._experts(),
        }

    @property
    def _longest_part(self) -> Resource:
        """The part of a round that takes most of the time."""
        if self.draft_s > self.pass_s:
            return "drafter"
        return "disk" if self.read_s > self.compute_s else "compute"

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
    pass_s = passes.seconds(holding, read_s, compute_s)
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
