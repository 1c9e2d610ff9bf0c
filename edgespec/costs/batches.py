"""Shared passes: their time, their yield, and the number of sequences worth having.

With several sequences, every pass gives each of them one token, so it has a row for each. What a sequence
costs besides its row is memory: its keys and values take cells of the cache, which weights could have had.
And its prompt: passes for prompts have no more rows than others, so that many short prompts take many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import read_seconds, round_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.prompts import USUAL_ANSWER, predict_prompt

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 60)
"""Numbers of sequences that are considered if none is asked for. Padded exact passes have at most 60 rows."""

_ENOUGH = 0.95  # of the highest speed: more sequences than that takes would only wait longer


@dataclass(frozen=True)
class SequenceCells:
    """The memory of a sequence in the KV cache."""

    cell_bytes: int  # keys and values of one token, in all layers
    tokens: int  # of a usual sequence, prompt and answer together

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence."""
        return self.cell_bytes * self.tokens


@dataclass(frozen=True)
class TextLengths:
    """The tokens of a sequence's prompt, and of its answer."""

    prompt: int
    answer: int

    @classmethod
    def of(cls, tokens: int) -> TextLengths:
        """The usual lengths in a sequence of so many tokens."""
        answer = min(USUAL_ANSWER, max(tokens // 2, 1))
        return cls(tokens - answer, answer)


ANSWER_ALONE = TextLengths(0, 1)
"""Of sequences whose prompts were read before, or are not to count."""


@dataclass(frozen=True)
class BatchPrediction:
    """The speed expected with so many sequences at once, without drafts."""

    sequences: int
    holding: PlannedWeights  # where the weights are when the cache has room for that many sequences
    pass_s: float  # seconds of a pass; read_s and compute_s are its two parts, which overlap
    read_s: float
    compute_s: float
    round_s: float  # the same with everything else that a round takes
    text: TextLengths = ANSWER_ALONE  # how long each sequence is
    prompt_s: float = 0.0  # seconds in which the prompts of all sequences are read

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences' answers together, while their prompts are read and they are answered."""
        return self.sequences * self.tokens_per_second_a_sequence

    @property
    def tokens_per_second_a_sequence(self) -> float:
        """Tokens of each sequence's answer."""
        return self.text.answer / (self.prompt_s + self.text.answer * self.round_s)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "texts": self.sequences,
            "tokens_per_second": round(self.tokens_per_second, 6),
            "tokens_per_second_a_text": round(self.tokens_per_second_a_sequence, 6),
            "prompt_tokens": self.text.prompt,
            "answer_tokens": self.text.answer,
            "prompt_s": round(self.prompt_s, 5),
            "pass_s": round(self.pass_s, 5),
            "read_s": round(self.read_s, 5),
            "compute_s": round(self.compute_s, 5),
            "resident_bytes": self.holding.resident_bytes,
            "streamed_bytes_per_pass": self.holding.pass_bytes(self.sequences),
        }


def predict_batch(
    holding: PlannedWeights,
    passes: TargetPasses,
    sequences: int,
    text: TextLengths = ANSWER_ALONE,
    rows: int = 1,
) -> BatchPrediction:
    """The speed with so many sequences in every pass, each with one row.

    Args:
        holding: with room in the cache for that many sequences.
        text: how long each of them is.
        rows: most rows of a pass that reads prompts.
    """
    compute_s = passes.compute.at(sequences)
    read_s = read_seconds(holding.pass_bytes(sequences), passes.read_rate)
    pass_s = passes.seconds(holding, read_s, compute_s)
    prompts = predict_prompt(holding, passes, sequences * text.prompt, rows)
    return BatchPrediction(
        sequences,
        holding,
        pass_s,
        read_s,
        compute_s,
        round_seconds(0.0, pass_s, passes.accept_s),
        text,
        prompts.seconds,
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
