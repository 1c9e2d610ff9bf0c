"""Answers as batches to train on, in an order that a seed fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgespec.drafting.tuning.data.answers import TargetAnswer

_MAX_TOKENS = 512  # of a text; what is behind them is cut off


@dataclass(frozen=True)
class TrainingBatch:
    """A few texts, one after another."""

    lengths: tuple[int, ...]  # of each text
    tokens: Tensor  # (length of all texts) prompts and answers
    rows: Tensor  # (known rows) places of the tokens behind which the target's distribution is known
    top: Tensor  # (known rows, k) its most likely tokens
    logprobs: Tensor  # (known rows, k) their log-probabilities


def batch_of(answers: Sequence[TargetAnswer]) -> TrainingBatch:
    """The batch of these answers."""
    texts = [text_of(answer) for answer in answers]
    rows, top, logprobs = [], [], []
    begin = 0
    for answer, text in zip(answers, texts, strict=True):
        first = len(answer.text.prompt) - 1
        count = max(min(len(answer.top), len(text) - first), 0)
        rows.append(torch.arange(begin + first, begin + first + count))
        top.append(answer.top[:count])
        logprobs.append(answer.logprobs[:count])
        begin += len(text)
    return TrainingBatch(
        tuple(map(len, texts)),
        torch.tensor([token for text in texts for token in text]),
        torch.cat(rows),
        torch.from_numpy(np.concatenate(top).astype(np.int64)),
        torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
    )


def text_of(answer: TargetAnswer) -> tuple[int, ...]:
    """The tokens of a prompt and its answer, as far as they are learned from."""
    return (*answer.text.prompt, *answer.text.answer)[:_MAX_TOKENS]


def answers_of_step(count: int, step: int, size: int, seed: int) -> list[int]:
    """Return which of `count` answers a step learns from: each once, in a new order each time around."""
    steps = max(count // size, 1)
    turn, place = divmod(step, steps)
    order: list[int] = np.random.default_rng([seed, turn]).permutation(count).tolist()
    return order[place * size : (place + 1) * size]


def tokens_seen(answers: Sequence[TargetAnswer]) -> Tensor:
    """(count) every token that is among the most likely of any row, in order of its id.

    The output layer is computed for these alone: other tokens have next to none of the target's probability,
    and a drafter that is near its target gives them as little.
    """
    found = np.unique(np.concatenate([answer.top.ravel() for answer in answers]))
    return torch.from_numpy(found.astype(np.int64))
