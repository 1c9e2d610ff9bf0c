"""The time of a target pass, and of a round of draft and pass: the one model behind every prediction.

A round is a draft, a pass, and the time to accept. A pass computes and, where the target is streamed, reads
weights; each hides the other for as long as it lasts. A draft is a number of decodes, each reading some rows.

These functions predict. `speculation.sizing.running_costs` corrects the figures by what decoding measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from edgespec.costs.curves import Curve

USUAL_OVERLAP = 4.0  # where it was not measured
SLOWDOWN_BESIDE_READS = 1.05  # how much longer arithmetic takes while layers are read
_TELLING = 0.1  # share of a pass spent waiting from which it says how fast weights arrive
_OVERLAPS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True)
class RoundCosts:
    """The times of drafting and verifying for one pair of models, as far as tree sizes depend on them."""

    compute: Curve  # seconds of a round without its draft and without reading, by nodes of the tree
    # seconds of a draft step that reads one node; None where drafting takes next to no time
    step_s: float | None = None
    row_s: float = 0.0  # seconds that each further node of a step adds
    read_s: float = 0.0  # seconds of reading streamed weights; see pass_seconds
    overlap: float = math.inf

    @cached_property
    def verify(self) -> Curve:
        """Seconds of a round without its draft, by nodes of the tree."""
        return streamed_curve(self.compute, self.read_s, self.overlap)


def pass_seconds(read_s: float, compute_s: float, overlap: float = math.inf) -> float:
    """Seconds of a pass from those of its reading and of its arithmetic.

    The longer of the two where they differ much. Where they are close, each waits for the other now and then,
    because neither is quite even, and the threads that read take processor time from the arithmetic. The pass
    then takes longer than either, by the norm with the exponent `overlap`.
    """
    longer, shorter = max(read_s, compute_s), min(read_s, compute_s)
    if shorter <= 0 or overlap == math.inf:
        return longer
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap))


def read_seconds_within(pass_s: float, compute_s: float, overlap: float = math.inf) -> float | None:
    """Seconds of the reading in a pass that was measured: the inverse of `pass_seconds`.

    Returns:
        None if the arithmetic alone takes about as long, so that the pass does not say.
    """
    if compute_s > (1 - _TELLING) * pass_s:
        return None
    if overlap == math.inf or compute_s <= 0:
        return pass_s
    return float(pass_s * (1 - (compute_s / pass_s) ** overlap) ** (1 / overlap))


def fitted_overlap(compute: Curve, whole: Curve, read_s: float) -> float:
    """The exponent for `pass_seconds` that fits measured passes best.

    Args:
        compute, whole: seconds of arithmetic, and of the whole pass, at the same rows.
        read_s: seconds of reading, the same in every pass.
    """

    def error(overlap: float) -> float:
        return sum(
            math.log(taken / pass_seconds(read_s, busy, overlap)) ** 2
            for busy, taken in zip(compute.seconds, whole.seconds, strict=True)
            if busy > 0 and taken > 0
        )

    return min(_OVERLAPS, key=error)


def read_seconds(
    streamed_bytes: int, read_rate: float, *, ring_bytes: int = 0, drafting_s: float = 0.0
) -> float:
    """Seconds that a pass spends reading weights; 0 if nothing is streamed or the rate is not known.

    Args:
        streamed_bytes: read in every pass.
        read_rate: bytes a second.
        ring_bytes: most that is read ahead while the drafter works, which takes `drafting_s`.
    """
    if not streamed_bytes or not read_rate:
        return 0.0
    return (streamed_bytes - min(ring_bytes, read_rate * drafting_s)) / read_rate


def streamed_curve(compute: Curve, read_s: float, overlap: float = math.inf) -> Curve:
    """Seconds of passes by rows; see `pass_seconds`."""
    if not read_s:
        return compute
    floored = compute.floored(read_s)
    corner = floored.knee(0.0)
    near = {max(corner * quarters // 4, 1) for quarters in (2, 3, 5, 6)} if overlap < math.inf else set()
    return Curve.through(
        (rows, pass_seconds(read_s, compute.at(rows), overlap)) for rows in {*floored.rows, *near}
    )


def draft_seconds(step: Curve, steps: float, rows: float, max_rows: float = math.inf) -> float:
    """Seconds of the decodes that grow a tree.

    Args:
        step: seconds of one decode, by rows.
        steps, rows: how many decodes, and the rows of all of them.
        max_rows: of one decode.
    """
    if not steps:
        return 0.0
    return steps * step.at(min(max(rows / steps, 1.0), max_rows))


def even_draft_seconds(step_s: float, row_s: float, steps: float, rows: float) -> float:
    """A linear variant of `draft_seconds`: each additional row costs the same.

    Args:
        step_s: seconds of a decode of one row.
        row_s: seconds that each further row adds.
        steps, rows: how many decodes, and the rows of all of them.
    """
    return steps * step_s + max(rows - steps, 0) * row_s


def even_step(step: Curve, width: int, overhead: float = 1.0) -> tuple[float, float]:
    """The `step_s` and `row_s` that come closest to a curve from one row to `width`."""
    first, last = step.at(1) * overhead, step.at(width) * overhead
    return first, (last - first) / max(width - 1, 1)


def round_seconds(draft_s: float, pass_s: float, accept_s: float = 0.0) -> float:
    """Seconds of a round: the drafter and the target take turns, so nothing hides here."""
    return draft_s + pass_s + accept_s
