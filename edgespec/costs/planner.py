"""From what was measured to a plan: how fast a target would run, held and drafted for in each possible way.

A round takes as long as its draft and its pass. A pass takes about as long as its arithmetic or its reading,
whichever is longer; what the ring read ahead while the drafter worked need not be waited for. Tokens a pass
come from what trees of this pair were seen to yield.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.yields import BUDGETS, Yields

Bound = Literal["disk", "compute", "drafter"]

_CLOSE = 1.03  # a larger tree, or any at all, must gain more than this


@dataclass(frozen=True)
class Passes:
    """Passes of a target.

    Attributes:
        compute: seconds of arithmetic by rows.
        read_rate: bytes of weights that arrive a second; 0 if that is not known.
        accept_s: seconds of a round outside draft and pass.
        overlap: how well the longer of reading and arithmetic hides the other; see `pass_time.pass_seconds`.
        measured: they are this model's, and not derived from another's.
    """

    compute: Curve
    read_rate: float = 0.0
    accept_s: float = 0.0
    overlap: float = math.inf
    measured: bool = True


@dataclass(frozen=True)
class Drafting:
    """What drafts for the target.

    Attributes:
        name: of the drafter; "none" for plain decoding.
        step: seconds of a draft step by rows; None where it costs next to nothing.
        overhead: seconds of growing a tree over those of its steps.
        width: most rows of a step.
        measured: the figures are this pair's.
    """

    name: str
    yields: Yields | None = None
    step: Curve | None = None
    overhead: float = 1.0
    width: int = 8
    source: str = ""
    measured: bool = True

    def seconds(self, nodes: int) -> float:
        """Seconds of growing a tree of so many nodes."""
        if self.yields is None or self.step is None or nodes < 2:
            return 0.0
        steps, rows = self.yields.steps_at(nodes), self.yields.rows_at(nodes)
        return draft_seconds(self.step, steps, rows, self.width) * self.overhead


@dataclass(frozen=True)
class Prediction:
    """One way to run, and what is expected of it.

    Attributes:
        pass_s, draft_s: seconds of a pass and of a draft; `read_s` and `compute_s` are the pass's two sides.
        bound: what most of the time goes to.
    """

    holding: PlannedMemory
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
        """What a person sees."""
        return self.tokens_per_pass / self.round_s

    @property
    def bound(self) -> Bound:
        """What most of the time goes to."""
        if self.draft_s > self.pass_s:
            return "drafter"
        return "disk" if self.read_s > self.compute_s else "compute"

    def to_json(self) -> dict[str, Any]:
        """What scripts see."""
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
        }


def predict(holding: PlannedMemory, passes: Passes, drafting: Drafting, nodes: int) -> Prediction:
    """What trees of so many nodes would give; one node is plain decoding."""
    draft_s = drafting.seconds(nodes)
    compute_s = passes.compute.at(nodes)
    read_s = read_seconds(
        holding.streamed_bytes,
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


@dataclass(frozen=True)
class PromptTime:
    """How long a prompt takes to be read.

    Attributes:
        tokens: of the prompt.
        rows: most of a piece, which is read in one pass.
        passes: pieces, and so sweeps over the streamed weights.
        compute_s, read_s: arithmetic and reading of all of them, which go on side by side.
        seconds: of both together.
    """

    tokens: int
    rows: int
    passes: int
    compute_s: float
    read_s: float
    seconds: float

    @property
    def bound(self) -> Bound:
        """Which of the two takes longer."""
        return "disk" if self.read_s > self.compute_s else "compute"

    def to_json(self) -> dict[str, Any]:
        """What scripts see."""
        return {
            "tokens": self.tokens,
            "rows": self.rows,
            "passes": self.passes,
            "compute_s": round(self.compute_s, 4),
            "read_s": round(self.read_s, 4),
            "seconds": round(self.seconds, 4),
            "bound": self.bound,
        }


def predict_prompt(holding: PlannedMemory, passes: Passes, tokens: int, rows: int) -> PromptTime:
    """What a prompt of so many tokens would take in pieces of so many rows."""
    whole, rest = divmod(tokens, rows)
    pieces = [rows] * whole + ([rest] if rest else [])
    compute = [passes.compute.at(piece) for piece in pieces]
    sweep_s = read_seconds(holding.streamed_bytes, passes.read_rate)
    return PromptTime(
        tokens,
        rows,
        len(pieces),
        sum(compute),
        sweep_s * len(pieces),
        sum(pass_seconds(sweep_s, compute_s, passes.overlap) for compute_s in compute),
    )


def alternatives(
    holding: PlannedMemory, passes: Passes, drafting: Drafting, most: int, budgets: Sequence[int] = BUDGETS
) -> list[Prediction]:
    """Every tree size, up to `most` nodes, one node first."""
    limit = 1 if drafting.yields is None else min(most, max(drafting.yields.tokens))
    return [predict(holding, passes, drafting, nodes) for nodes in budgets if nodes <= limit]


def best(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest; of ways that are about as fast, the one that comes first."""
    chosen: Prediction | None = None
    for prediction in predictions:
        if chosen is None or prediction.tokens_per_second > _CLOSE * chosen.tokens_per_second:
            chosen = prediction
    if chosen is None:
        raise ValueError("there is nothing to choose from")
    return chosen


@dataclass(frozen=True)
class Advice:
    """A change, and by how much the best plan would be faster with it: 0.6 is 60 %."""

    what: str
    gain: float

    def to_json(self) -> dict[str, Any]:
        """What scripts see."""
        return {"what": self.what, "gain": round(self.gain, 3)}


def advise(
    chosen: Prediction,
    passes: Passes,
    drafting: Drafting,
    most: int,
    more_memory: Sequence[tuple[str, PlannedMemory]] = (),
) -> list[Advice]:
    """What would help most, the best first; what gains less than a twentieth is left out.

    Args:
        more_memory: other holdings, by what they are called.
    """

    def speed(holding: PlannedMemory, passes: Passes, drafting: Drafting) -> float:
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
