"""Routers for synthetic mixtures of experts, with choices of a given skew and locality.

How well single experts can be streamed depends on the routers' choices: whether some experts are chosen more
often than others, and whether neighbouring tokens choose alike. Random routers have neither property as
intended: the states that they see have a large mean, by which they would choose the same experts always. So
the states of a text are looked at first, and the routers are built from directions in which these vary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import AllInMemory

Floats = NDArray[np.float64]

_STATES = b"ffn_norm-"  # llama.cpp's name for what a layer's router sees
_OUTLIERS = 4  # first tokens, whose states are unlike all others
_WINDOW = 24  # tokens over which slow directions are averaged
_SHARPNESS = 1.5  # spread of the logits: how much a token prefers some experts

# Of several kinds, so that what is popular changes within it.
_TEXT = """Once upon a time there was a fox who lived near the edge of a quiet forest. Every morning he walked
down to the river, and every evening he told his children what he had seen there. One winter the river froze,
and nobody could say where the otters had gone.
To install the program, open a terminal and type the command below. If it fails, check that the compiler is on
the path, and that at least two gigabytes of disk are free. Then run the tests again with the option for more
details.
def area(width: float, height: float) -> float:
    if width < 0 or height < 0:
        raise ValueError("sizes cannot be negative")
    return width * height
The treaty was signed in the spring, after nine months of talks. It fixed the border along the ridge, gave
both sides the right to fish, and left the question of the islands to a commission that never met.
Question: A train leaves at 9:40 and takes two hours and fifty minutes. When does it arrive? Answer: 9:40 plus
two hours is 11:40, and fifty more minutes make it 12:30.
Heat the oil in a wide pan, add the onions, and let them soften for ten minutes over a low flame. Stir in the
flour, then the stock, a little at a time, until the sauce is smooth. Season with salt, pepper and nutmeg."""


def routers_for(
    source: Path, n_experts: int, *, skew: float, locality: float, seed: int = 1
) -> list[NDArray[np.float32]]:
    """Routers for the layers of a dense model, each (experts, embedding).

    Args:
        skew: standard deviation of the experts' popularity, in that of their logits; 0 for none.
        locality: from 0 to 1, the share of the logits' variance in directions in which the states of a text
            change slowly.

    Raises:
        ModelFileError, MemoryLimitError: the model cannot be loaded.
    """
    rng = np.random.default_rng(seed)
    return [_router(states, n_experts, skew, locality, rng) for states in _states_of(source)]


def _router(
    states: Floats, n_experts: int, skew: float, locality: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    mean = states.mean(axis=0)
    varying = states - mean
    kernel = np.ones(_WINDOW) / _WINDOW
    slow = np.stack([np.convolve(column, kernel, mode="same") for column in varying.T], axis=1)

    def unit(directions: Floats) -> Floats:
        """Normalize to mean 0, and to logits of variance 1."""
        directions = directions - np.outer(directions @ mean, mean) / (mean @ mean)
        return np.asarray(directions / np.maximum((varying @ directions.T).std(axis=0), 1e-9)[:, None])

    quick = unit(rng.standard_normal((n_experts, states.shape[1])))
    lasting = unit(rng.standard_normal((n_experts, len(slow))) @ slow)
    popularity = np.outer(skew * rng.standard_normal(n_experts), mean) / (mean @ mean)
    mixed = np.sqrt(1 - locality) * quick + np.sqrt(locality) * lasting
    return np.asarray(_SHARPNESS * (mixed + popularity), np.float32)


def _states_of(source: Path) -> list[Floats]:
    """(tokens, embedding) The input of each layer's feed-forward block for the text."""
    seen = _StatesSeen()
    with Model(source, weights=seen) as model:
        tokens = model.vocabulary.tokenize(_TEXT, control=False)
        context = Context(
            model, n_cells=len(tokens), n_rows=len(tokens), n_outputs=len(tokens), n_sequences=1, n_threads=1
        )
        context.decode(TokenBatch.run(tokens, 0, n_sequences=1, logits="all"))
    return [seen.states[layer][_OUTLIERS:] for layer in sorted(seen.states)]


class _StatesSeen(AllInMemory, GraphObserver):
    """Keeps what the feed-forward blocks of a model see; it observes the graph for that."""

    def __init__(self) -> None:
        self.observers: Sequence[GraphObserver] = [self]
        self.states: dict[int, Floats] = {}
        self.watch = Watch()
        self.watch.stop_after(_STATES, prefix=True)

    def computed(self, node: Address) -> None:
        """Keep the states of a layer."""
        width, rows = ggml.shape_of(node).sizes[:2]
        data = ggml.functions()["ggml_get_data"](node)
        memory = (ctypes.c_float * (width * rows)).from_address(data)
        values = np.frombuffer(memoryview(memory), np.float32)
        layer = int(ggml.name_of(node)[len(_STATES) :])
        self.states[layer] = values.reshape(rows, width).astype(np.float64)
