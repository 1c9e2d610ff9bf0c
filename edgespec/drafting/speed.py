"""The speed of a target with a drafter, from how often they agree and what a draft step takes."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.costs.pass_time import even_draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.drafting.agreement import Agreement, PassCost

_DEEPEST = 16


@dataclass(frozen=True)
class CostModel:
    """The speed of a target with a drafter."""

    pass_s: float  # of the target, over a tree
    # Bytes per second at which a streamed target is read; 0 if it is in memory. What the drafter takes of the
    # memory must be read from disk in every pass.
    read_rate: float = 0.0
    read_s: float | None = None  # of a pass, during which the disk reads; None if it reads all the time

    @classmethod
    def of(cls, cost: PassCost, pass_s: float | None = None) -> CostModel:
        """The model of a target whose passes were measured.

        Args:
            pass_s: seconds of a pass to count with instead.
        """
        pass_s = pass_s or cost.pass_s
        if not cost.streamed_bytes or not cost.read_rate:
            return cls(pass_s)
        return cls(pass_s, cost.read_rate, min(read_seconds(cost.streamed_bytes, cost.read_rate), pass_s))

    def tokens_per_second(self, agreement: Agreement, step_s: float, n_bytes: int) -> float:
        """Expected speed with trees of the best depth.

        A level of the tree holds the target's choice if the drafter's first choice is right, and about half
        of the time if only one of its first four is.
        """
        level = (agreement.top1 + agreement.top4) / 2
        pass_s = self.pass_s
        if self.read_rate:
            read_s = pass_s if self.read_s is None else self.read_s
            pass_s = pass_seconds(read_s + read_seconds(n_bytes, self.read_rate), pass_s)
        expected, reached, best = 1.0, 1.0, 0.0
        for depth in range(1, _DEEPEST + 1):
            reached *= level
            expected += reached
            draft_s = even_draft_seconds(step_s, 0.0, steps=depth, rows=depth)
            best = max(best, expected / round_seconds(draft_s, pass_s))
        return best
