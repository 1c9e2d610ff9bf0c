"""Shared passes: their time, their yield, and the number of sequences worth having.

With several sequences, every pass gives each of them one token, so it has a row for each. What a sequence
costs besides its row is memory: its keys and values take cells of the cache, which weights could have had.
And its prompt: passes for prompts have no more rows than others, so that many short prompts take many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import read_seconds, round_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.prompts import USUAL_ANSWER, prompt_seconds

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


def batch_speed(
    holding: PlannedWeights, passes: TargetPasses, sequences: int, text: TextLengths, rows: int
) -> float:
    """Tokens per second of all sequences' answers together, without drafts, prompts included.

    Args:
        holding: with room in the cache for that many sequences.
        text: how long each of them is.
        rows: most rows of a pass that reads prompts.
    """
    read_s = read_seconds(holding.pass_bytes(sequences), passes.read_rate)
    pass_s = passes.seconds(holding, read_s, passes.compute.at(sequences))
    answer_s = text.answer * round_seconds(0.0, pass_s, passes.accept_s)
    prompts_s = prompt_seconds(holding, passes, sequences * text.prompt, rows)
    return sequences * text.answer / (prompts_s + answer_s)


def fewest_sequences(speeds: Mapping[int, float]) -> int:
    """The fewest sequences that come close to the highest speed.

    Args:
        speeds: tokens per second of all together, by their number.
    """
    wanted = _ENOUGH * max(speeds.values())
    return min(sequences for sequences, speed in speeds.items() if speed >= wanted)


def knee_of_sequences(curve: Curve, most: int) -> int:
    """The fewest sequences that come close to the highest speed of passes that take so long.

    Args:
        curve: seconds of a pass, by rows.
        most: sequences that are possible.
    """
    possible = [sequences for sequences in SIZES if sequences <= most] or [max(most, 1)]
    return fewest_sequences({n: n / max(curve.at(n), 1e-9) for n in possible})
