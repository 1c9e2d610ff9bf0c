"""The synthetic mixtures of benchmarks.experts compute what the dense model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import edgespec
from benchmarks.mixture import mix
from benchmarks.routers import routers_for
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from tests.tiny import N_EMBD, N_LAYER, write_tiny


def logits_of(model: Path) -> np.ndarray:
    with edgespec.load(model, draft="none", context=64) as engine:
        engine.generate("the one and the other", GenerationConfig(max_tokens=1), raw=True)
        return engine.target.context.logits().copy()


def test_a_mixture_computes_what_the_dense_model_does(smol_path: Path, tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense.gguf", "llama", smol_path)
    found = routers_for(dense, 8, skew=0.7, locality=0.5)
    assert [router.shape for router in found] == [(8, N_EMBD)] * N_LAYER
    mixed = mix(dense, tmp_path / "mixed.gguf", found, 2)
    weights = layer_weights(ModelFiles.of(read_header(mixed)))
    assert (weights.n_used, weights.n_experts) == (2, 8 * N_LAYER)
    expected, logits = logits_of(dense), logits_of(mixed)
    assert np.abs(logits - expected).max() < 0.02 * expected.std()
