"""Shared passes: their time, their yield, and the number of sequences worth having.

With several sequences, every pass gives each of them one token, so it has a row for each. What a sequence
costs besides its row is memory: its keys and values take cells of the cache, which weights could have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import read_seconds, round_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import TargetPasses

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 60)
"""Numbers of sequences that are considered if none is asked for. Padded exact passes have at most 60 rows."""

_ENOUGH = 0.95  # of the highest speed: more sequences than that takes would only wait longer


@dataclass(frozen=True)
class SequenceCells:
    """The memory of a sequence in the KV cache.

    Attributes:
        cell_bytes: keys and values of one token, in all layers.
        tokens: of a usual sequence, prompt and answer together.
    """

    cell_bytes: int
    tokens: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence."""
        return self.cell_bytes * self.tokens

    def sequences_in(self, n_bytes: int) -> int:
        """The number of sequences that fit in so many bytes."""
        return max(n_bytes, 0) // max(self.sequence_bytes, 1)


@dataclass(frozen=True)
class BatchPrediction:
    """The speed expected with so many sequences at once, without drafts.

    Attributes:
        holding: where the weights are when the cache has room for that many sequences.
        pass_s: seconds of a pass; read_s and compute_s are its two parts, which overlap.
        round_s: the same with everything else that a round takes.
    """

    sequences: int
    holding: PlannedWeights
    pass_s: float
    read_s: float
    compute_s: float
    round_s: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences together."""
        return self.sequences / self.round_s

    @property
    def tokens_per_second_a_sequence(self) -> float:
        """Tokens of each sequence."""
        return 1 / self.round_s

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "texts": self.sequences,
            "tokens_per_second": round(self.tokens_per_second, 6),
            "tokens_per_second_a_text": round(self.tokens_per_second_a_sequence, 6),
            "pass_s": round(self.pass_s, 5),
            "read_s": round(self.read_s, 5),
            "compute_s": round(self.compute_s, 5),
            "resident_bytes": self.holding.resident_bytes,
            "streamed_bytes_per_pass": self.holding.pass_bytes(self.sequences),
        }


def predict_batch(holding: PlannedWeights, passes: TargetPasses, sequences: int) -> BatchPrediction:
    """The speed with so many sequences in every pass, each with one row.

    Args:
        holding: with room in the cache for that many sequences.
    """
    compute_s = passes.compute.at(sequences)
    read_s = read_seconds(holding.pass_bytes(sequences), passes.read_rate)
    pass_s = passes.seconds(holding, read_s, compute_s)
    return BatchPrediction(
        sequences, holding, pass_s, read_s, compute_s, round_seconds(0.0, pass_s, passes.accept_s)
    )


def fewest_sequences(predictions: Iterable[BatchPrediction]) -> BatchPrediction:
    """The prediction with the fewest sequences that comes close to the highest speed.

    Raises:
        ValueError: there are no predictions.
    """
    known = sorted(predictions, key=lambda prediction: prediction.sequences)
    if not known:
        raise ValueError("there is nothing to choose from")
    wanted = _ENOUGH * max(prediction.tokens_per_second for prediction in known)
    return next(prediction for prediction in known if prediction.tokens_per_second >= wanted)


def knee_of_sequences(curve: Curve, most: int, sizes: Sequence[int] = SIZES) -> int:
    """The fewest sequences that come close to the highest speed of passes that take so long.

    Args:
        curve: seconds of a pass, by rows.
        most: sequences that are possible.
    """
    possible = [sequences for sequences in sizes if sequences <= most] or [max(most, 1)]
    speeds = [sequences / max(curve.at(sequences), 1e-9) for sequences in possible]
    wanted = _ENOUGH * max(speeds)
    return next(sequences for sequences, speed in zip(possible, speeds, strict=True) if speed >= wanted)
