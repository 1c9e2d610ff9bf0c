"""The time to read a prompt, and the size of the pieces in which prompts are best read.

A prompt is read in pieces, and each piece takes a sweep over the streamed weights. Larger pieces need fewer
sweeps, but their activations take memory that could hold weights, which every later pass then reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.costs.pass_time import read_seconds
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import TargetPasses

USUAL_ANSWER = 128
"""Passes of a usual answer, which pay for what larger pieces displace."""

_ENOUGH = 1.03  # times the least time: larger pieces than that takes would only make other texts wait longer


def usual_prompt(context: int) -> int:
    """Tokens of the prompts by which pieces are sized: who asks for a long context has long prompts."""
    return max(context // 2, 1)


def prompt_seconds(holding: PlannedWeights, passes: TargetPasses, tokens: int, rows: int) -> float:
    """Seconds to read a prompt of this many tokens in pieces of so many rows."""
    seconds = 0.0
    for start in range(0, tokens, rows):
        piece = min(rows, tokens - start)
        read_s = read_seconds(holding.pass_bytes(piece), passes.read_rate)
        seconds += passes.seconds(holding, read_s, passes.compute.at(piece))
    return seconds


def best_rows(holdings: Mapping[int, PlannedWeights], passes: TargetPasses, tokens: int) -> int:
    """The fewest rows of a piece with which a prompt and a usual answer take hardly longer than they must.

    Args:
        holdings: rows of the largest pieces to where weights are held beside their activations.
        tokens: of the prompt.

    Raises:
        ValueError: there is nothing to choose from.
    """

    def seconds(rows: int) -> float:
        holding = holdings[rows]
        read_s = read_seconds(holding.pass_bytes(1), passes.read_rate)
        answer_s = USUAL_ANSWER * passes.seconds(holding, read_s, passes.compute.at(1))
        return prompt_seconds(holding, passes, tokens, rows) + answer_s

    taken = {rows: seconds(rows) for rows in holdings}
    return min(rows for rows, n in taken.items() if n <= _ENOUGH * min(taken.values()))
