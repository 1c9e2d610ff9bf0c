"""Answers as batches to train on, in an order that a seed fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgespec.drafting.tuning.answers import Answer

_MOST_TOKENS = 512  # of a text; what is behind them is cut off


@dataclass(frozen=True)
class Batch:
    """A few texts, padded to the longest.

    Attributes:
        tokens: (texts, length) prompts and answers.
        rows: (texts, length) whether the target's distribution behind a token is known.
        top: (known rows, k) its most likely tokens.
        logprobs: (known rows, k) their log-probabilities.
    """

    tokens: Tensor
    rows: Tensor
    top: Tensor
    logprobs: Tensor


def batch_of(answers: Sequence[Answer]) -> Batch:
    """The batch of these answers; padding stands behind each text and is never looked at."""
    texts = [[*answer.text.prompt, *answer.text.answer][:_MOST_TOKENS] for answer in answers]
    length = max(map(len, texts))
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    rows = torch.zeros(len(texts), length, dtype=torch.bool)
    top, logprobs = [], []
    for number, (answer, text) in enumerate(zip(answers, texts, strict=True)):
        tokens[number, : len(text)] = torch.tensor(text)
        first = len(answer.text.prompt) - 1
        count = max(min(len(answer.top), len(text) - first), 0)
        rows[number, first : first + count] = True
        top.append(answer.top[:count])
        logprobs.append(answer.logprobs[:count])
    return Batch(
        tokens,
        rows,
        torch.from_numpy(np.concatenate(top).astype(np.int64)),
        torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
    )


def answers_of_step(answers: Sequence[Answer], step: int, size: int, seed: int) -> list[Answer]:
    """The answers of one step: every answer once, in a new order each time around."""
    steps = max(len(answers) // size, 1)
    turn, place = divmod(step, steps)
    order = np.random.default_rng([seed, turn]).permutation(len(answers))
    return [answers[index] for index in order[place * size : (place + 1) * size]]
