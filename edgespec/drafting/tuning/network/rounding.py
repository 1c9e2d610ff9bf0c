"""Matrices as their quantization will leave them, for training that accounts for it.

A matrix that comes from a file of few bits begins on that type's grid, and training moves its weights by
less than half a step of the grid: rounded again at the end, they would fall back to where they were. So the
network computes with the rounded weights, and the gradient passes the rounding by (straight-through
estimator, Bengio et al. 2013): small changes add up until a weight is worth its next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 32  # weights that share a scale, in ggml's types
ROUNDED = ("Q4_0", "Q4_1", "Q8_0")


def rounded(weight: Tensor, kind: str) -> Tensor:
    """(rows, columns) the matrix as ggml reads it back after it was written in this type.

    Args:
        kind: ggml's name of the type. Of one that is not in ROUNDED, and of rows that are no whole blocks,
            the matrix itself is returned.
    """
    if kind not in ROUNDED or weight.shape[-1] % _BLOCK:
        return weight
    with torch.no_grad():
        blocks = weight.detach().view(-1, _BLOCK)
        moved = _ROUNDINGS[kind](blocks).view_as(weight) - weight
    return weight + moved


def _q4_0(blocks: Tensor) -> Tensor:
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    steps = (blocks * _inverse(scale) + 8.5).floor_().clamp_(0, 15).sub_(8)
    return steps.mul_(_half(scale))


def _q4_1(blocks: Tensor) -> Tensor:
    least, most = blocks.aminmax(dim=1, keepdim=True)
    scale = (most - least) / 15
    steps = (blocks - least).mul_(_inverse(scale)).add_(0.5).floor_().clamp_(0, 15)
    return steps.mul_(_half(scale)).add_(_half(least))


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks * _inverse(scale)).round_().mul_(_half(scale))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _half(scale: Tensor) -> Tensor:
    """Round as in storage."""
    return scale.half().float()


_ROUNDINGS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
