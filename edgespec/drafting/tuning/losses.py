"""The distance of a drafter from its target, by what is known of the target's distribution.

Known are a few of the most likely tokens with their probabilities. All others count as one token: how the
target shares out the little that is left among them is neither known nor worth learning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def divergence(logits: Tensor, top: Tensor, logprobs: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of a drafter from its target, in nats, over rows.

    A lower bound of that over all tokens, since some are merged, and 0 if the two agree.

    Args:
        logits: (rows, n_tokens) the drafter's.
        top: (rows, k) columns of the target's most likely tokens.
        logprobs: (rows, k) their log-probabilities by the target.
    """
    drafted = _drafted(logits, top)
    listed = (logprobs.exp() * (logprobs - drafted)).sum(-1)
    rest, drafted_rest = _rest(logprobs), _rest(drafted)
    return (listed + rest * (rest.log() - drafted_rest.log())).mean()


def total_variation(logits: Tensor, top: Tensor, logprobs: Tensor) -> Tensor:
    """The mean total variation distance, from 0 to 1, over rows; arguments as of `divergence`.

    It is the share of drawn drafts that speculative sampling rejects (Leviathan et al. 2023), so it is what
    DistillSpec (Zhou et al. 2024) trains on where acceptance itself is wanted.
    """
    drafted = _drafted(logits, top)
    common = torch.minimum(logprobs.exp(), drafted.exp()).sum(-1)
    return (1 - common - torch.minimum(_rest(logprobs), _rest(drafted))).mean()


LOSSES: dict[str, Loss] = {"divergence": divergence, "total variation": total_variation}


def _drafted(logits: Tensor, top: Tensor) -> Tensor:
    return logits.gather(-1, top) - logits.logsumexp(-1, keepdim=True)


def _rest(logprobs: Tensor) -> Tensor:
    """(rows) the probability of all tokens that are not listed."""
    tiny = torch.finfo(torch.float32).eps
    return (1 - logprobs.exp().sum(-1)).clamp(min=tiny)
