"""Rounding matrices so that what they compute of real text changes least (GPTQ, Frantar et al. 2023).

Rounding each weight to the nearest value loses most of what was learned, as training moves weights by less
than half a step. Here a matrix is rounded column by column, and after each one the columns still to come are
changed so that they make up for its error, on the inputs that the matrix has when it reads the target's
answers. Layers are rounded in turn, each with inputs that come from layers that are rounded already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from edgespec.drafting.tuning.data.answers import Answer
from edgespec.drafting.tuning.data.batches import text_of
from edgespec.drafting.tuning.network.extent import TrainedExtent
from edgespec.drafting.tuning.network.network import Network
from edgespec.drafting.tuning.network.weights import EncodedMatrix, ModelWeights, matrix_kinds
from edgespec.models.gguf.types import GGUFHeader
from edgespec.progress import Progress, no_progress

CALIBRATED = ("Q4_0", "Q4_1")
_BLOCK = 32  # weights that share a scale
_LEVELS = 16
_DAMPING = 0.01  # of the mean square of the inputs, added to each
_SHRUNK = tuple(
    1 - 0.05 * step for step in range(7)
)  # scales that are tried, of the one that covers all weights
_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class RoundedMatrix(EncodedMatrix):
    """A matrix on the grid of its type.

    Attributes:
        values: (rows, columns) what ggml reads.
    """

    values: Tensor


class _Recorder(Network):
    """A network that sums up the products of the inputs of each matrix."""

    products: dict[str, Tensor] | None = None

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if self.products is not None:
            products = x.T @ x
            known = self.products.get(f"{name}.weight")
            self.products[f"{name}.weight"] = products if known is None else known.add_(products)
        return super()._linear(x, name)


def calibrated_types(header: GGUFHeader) -> dict[str, str]:
    """The types of a model's matrices that `calibrate` can round to, by name."""
    return {name: kind for name, kind in matrix_kinds(header).items() if kind in CALIBRATED}


def calibrate(
    loaded: ModelWeights,
    kinds: Mapping[str, str],
    answers: Sequence[Answer],
    on_progress: Progress = no_progress,
) -> dict[str, RoundedMatrix]:
    """Round matrices of a model.

    Args:
        kinds: the type of each matrix that is rounded, one of CALIBRATED, by its name.
        answers: texts that it will read.

    Returns:
        By name, what each matrix is then.
    """
    recorder = _Recorder(loaded.shape, loaded.weights, TrainedExtent(loaded.shape.layers))
    groups = _groups([torch.tensor(text_of(answer)) for answer in answers])
    found: dict[str, RoundedMatrix] = {}
    with torch.no_grad():
        inputs = [
            torch.nn.functional.embedding(torch.cat(texts), recorder.weights["token_embd.weight"])
            * loaded.shape.embedding_scale
            for texts in groups
        ]
        lengths = [tuple(map(len, texts)) for texts in groups]
        for layer in range(loaded.shape.layers):
            on_progress(f"Rounding layer {layer}", layer / loaded.shape.layers)
            names = [name for name in kinds if name.startswith(f"blk.{layer}.")]
            if names:
                recorder.products = {}
                for x, counts in zip(inputs, lengths, strict=True):
                    recorder.through(layer, x, counts)
                products, recorder.products = recorder.products, None
                for name in names:
                    found[name] = round_matrix(recorder.weights[name], products[name], kinds[name])
                    recorder.weights[name] = found[name].values
            inputs = [recorder.through(layer, x, counts) for x, counts in zip(inputs, lengths, strict=True)]
    return found


def _groups(texts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Texts that are read at once."""
    groups: list[list[Tensor]] = [[]]
    for text in texts:
        if sum(map(len, groups[-1])) + len(text) > _TOKENS_AT_ONCE and groups[-1]:
            groups.append([])
        groups[-1].append(text)
    return groups


def round_matrix(weight: Tensor, products: Tensor, kind: str) -> RoundedMatrix:
    """Round a matrix.

    Args:
        weight: (rows, columns), of whole blocks.
        products: (columns, columns) the sums of products of its inputs.
        kind: one of CALIBRATED.
    """
    rows, columns = weight.shape
    left = weight.clone()
    products = products.clone()
    products.diagonal().add_(_DAMPING * products.diagonal().mean())
    # Row i tells how an error in column i is best made up for by the columns behind it.
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(products)), upper=True)
    importance = products.diagonal()
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales, minima = (torch.empty(rows, columns // _BLOCK) for _ in range(2))
    for start in range(0, columns, _BLOCK):
        end = start + _BLOCK
        scale, minimum = _grid(left[:, start:end], importance[start:end], kind)
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        errors = torch.empty(rows, _BLOCK)
        for place in range(_BLOCK):
            column = start + place
            code = ((left[:, column] - minimum) * inverse).round_().clamp_(0, _LEVELS - 1)
            error = (left[:, column] - code * scale - minimum) / spread[column, column]
            left[:, column:end] -= error[:, None] * spread[column, column:end]
            codes[:, column], errors[:, place] = code, error
        left[:, end:] -= errors @ spread[start:end, end:]
        scales[:, start // _BLOCK], minima[:, start // _BLOCK] = scale, minimum
    steps = codes.view(rows, -1, _BLOCK).float()
    values = (steps * scales[..., None] + minima[..., None]).view(rows, columns)
    return RoundedMatrix(_packed(codes, scales, minima, kind), Kind[kind], values)


def _grid(block: Tensor, importance: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(rows) the step, and the least value, of the best of some grids for each row of a block of columns."""
    if kind == "Q4_0":
        largest = block.gather(1, block.abs().argmax(1, keepdim=True))[:, 0]
        widest, middle = largest / -8, torch.zeros(len(block))
    else:
        least, most = block.aminmax(dim=1)
        widest, middle = (most - least) / (_LEVELS - 1), (most + least) / 2
    best = torch.full((len(block),), torch.inf)
    scale, minimum = torch.zeros(len(block)), torch.zeros(len(block))
    for share in _SHRUNK:
        step = _half(widest * share)
        first = -8 * step if kind == "Q4_0" else _half(middle - step * (_LEVELS - 1) / 2)
        codes = ((block - first[:, None]) * torch.where(step == 0, 0.0, 1 / step)[:, None]).round_()
        values = codes.clamp_(0, _LEVELS - 1) * step[:, None] + first[:, None]
        error = ((values - block).square() * importance).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, step, scale), torch.where(better, first, minimum)
    return scale, minimum


def _half(values: Tensor) -> Tensor:
    """Round as in storage."""
    return values.half().float()


def _packed(codes: Tensor, scales: Tensor, minima: Tensor, kind: str) -> NDArray[np.uint8]:
    """(rows, bytes of a row) in ggml's layout: the low halves of 16 bytes hold a block's first 16 codes."""
    rows = len(codes)
    halves = codes.view(rows, -1, 2, _BLOCK // 2).numpy()
    parts = [scales] if kind == "Q4_0" else [scales, minima]
    factors = [part.numpy().astype(np.float16)[..., None].view(np.uint8) for part in parts]
    return np.concatenate([*factors, halves[:, :, 0] | halves[:, :, 1] << 4], axis=2).reshape(rows, -1)
