"""The scales of quantized blocks: all that is trained of a file whose codes stay as they are.

Every type of ggml holds its weights as small integers, the codes, and a factor or two for each block of them.
A weight is linear in these factors, so a block's weights can be made larger or smaller without rounding
anything: what training on the scales alone learns (PEQA, Kim et al. 2023) survives in the file whole, and the
file takes the bytes, and the kernels, that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgespec.drafting.tuning.weights import Encoded

# Where in a block's bytes its factors stand, in F16 each (ggml-common.h). Minima are linear, too.
_FACTORS = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


def block_sizes(kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the number of weights that share a scale, for each matrix of a type that is known here.

    Args:
        kinds: ggml's name of the type of each matrix.
    """
    known = {kind.name: GGML_QUANT_SIZES[kind][0] for kind in _FACTORS}
    return {name: known[kind] for name, kind in kinds.items() if kind in known}


def scaled(path: Path, scales: Mapping[str, NDArray[np.float32]]) -> dict[str, Encoded]:
    """The matrices of a file with other scales, by name.

    Args:
        scales: (rows, blocks of a row) what the blocks of each matrix are multiplied by.
    """
    return {
        tensor.name: Encoded(
            with_scales(tensor.data, tensor.tensor_type, scales[tensor.name]), tensor.tensor_type
        )
        for tensor in GGUFReader(path).tensors
        if tensor.name in scales
    }


def with_scales(data: NDArray[np.uint8], kind: Kind, scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(rows, bytes of a row) a matrix whose blocks are so many times as large, with the same codes.

    Args:
        data: (rows, bytes of a row) as in the file.
        scales: (rows, blocks of a row) what each block is multiplied by.
    """
    n_bytes = GGML_QUANT_SIZES[kind][1]
    found = np.array(data)
    blocks = found.reshape(-1, n_bytes)
    for place in _FACTORS[kind]:
        factors = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)
        scaled = (factors.astype(np.float32) * scales.reshape(-1, 1)).astype(np.float16)
        blocks[:, place : place + 2] = scaled.view(np.uint8)
    return found
