"""The quality of a drafter on text of the target's that it has not learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.drafting.agreement import Agreement, AgreementMeter, CostModel, SampleAnswer

_SAME_SIZE = 0.02  # share by which equally shaped files may differ, in metadata


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a drafter."""

    path: Path
    agreement: Agreement
    step_s: float  # of a draft step of a few tokens
    n_bytes: int
    tokens_per_second: float  # that the target should reach with it, by its agreement and its step

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def evaluate(
    path: Path, samples: Sequence[SampleAnswer], cost: CostModel, like: Evaluation | None = None
) -> Evaluation:
    """Measure agreement and step of a drafter.

    Args:
        like: a drafter that was measured before. If this one has the same size, it takes as long: what two
            measurements of one time differ by must not decide.
    """
    n_bytes = path.stat().st_size
    with AgreementMeter(path, samples) as meter:
        agreement = meter.agreement(samples)
        same = like is not None and abs(like.n_bytes - n_bytes) < _SAME_SIZE * n_bytes
        step_s = like.step_s if like is not None and same else meter.step_s()
    return Evaluation(path, agreement, step_s, n_bytes, cost.tokens_per_second(agreement, step_s, n_bytes))
