"""Engines whose weights are streamed in the least memory that this machine needs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import MemoryLimitError
from edgespec.offload.weights import StreamedWeights


def load_in_least_memory(model: Path, spare: int = 0, **options: Any) -> Engine:
    """The model in the smallest budget that it can be loaded with, and `spare` bytes more."""
    return _load(model, spare, options)[0]


def least_memory(model: Path, **options: Any) -> int:
    """The smallest budget, in bytes, that the model can be loaded with."""
    engine, budget = _load(model, 0, options)
    engine.close()
    return budget


def _load(model: Path, spare: int, options: dict[str, Any]) -> tuple[Engine, int]:
    budget = 16 << 20
    while True:
        try:
            usual = {"offload": "stream", "draft": "none"}
            return edgespec.load(model, memory=budget, **{**usual, **options}), budget
        except MemoryLimitError as error:
            if error.least is None or error.least <= budget:
                raise
            budget = error.least + spare


def weights_of(engine: Engine) -> StreamedWeights:
    """The weights of an engine that streams them."""
    weights = engine.target.model.weights
    assert isinstance(weights, StreamedWeights)
    return weights
