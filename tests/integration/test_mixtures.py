"""Synthetic mixtures: what the dense model computes, behind routers of a given skew and locality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.bench.rows.synthetic import MixtureShape
from edgespec.errors import ModelFileError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.llama import routers
from edgespec.llama.routers import routers_for
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.synthesis.mixture import mix
from tests.tiny import N_EMBD, N_LAYER, write_tiny

PROMPT = "the one and the other"


def logits_of(model: Path) -> np.ndarray:
    with edgespec.load(model, draft="none", context=64) as engine:
        engine.generate(PROMPT, GenerationConfig(max_tokens=1), raw=True)
        return engine.target.context.logits().copy()


def test_a_mixture_computes_what_the_dense_model_does(smol_path: Path, tmp_path: Path) -> None:
    dense = write_tiny(tmp_path / "dense.gguf", "llama", smol_path)
    found = routers_for(dense, 8, skew=0.7, locality=0.5)
    assert [router.shape for router in found] == [(8, N_EMBD)] * N_LAYER
    mixed = mix(dense, tmp_path / "mixed.gguf", found, 2)
    header = read_header(mixed)
    assert header.metadata["edgespec.mixed_from"] == "dense.gguf"
    weights = layer_weights(ModelFiles.of(header))
    assert (weights.n_used, weights.n_experts) == (2, 8 * N_LAYER)
    expected, logits = logits_of(dense), logits_of(mixed)
    assert np.abs(logits - expected).max() < 0.02 * expected.std()
    with pytest.raises(ModelFileError, match="without dense feed-forward blocks"):
        mix(mixed, tmp_path / "again.gguf", found, 2)


def test_other_architectures_are_refused(smol_path: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", "qwen2", smol_path)
    with pytest.raises(ModelFileError, match="it is a qwen2"):
        mix(other, tmp_path / "mixed.gguf", [], 2)


def text_like_states(rng: np.random.Generator) -> np.ndarray:
    """(tokens, width) states with a large mean, and parts that change slowly and quickly."""
    slow = np.repeat(rng.standard_normal((8, 48)), 40, axis=0)
    return 4 * rng.standard_normal(48) + slow + rng.standard_normal((320, 48))


def test_skew_makes_some_experts_popular_and_locality_makes_neighbours_choose_alike() -> None:
    rng = np.random.default_rng(0)
    states = text_like_states(rng)

    def chosen(skew: float, locality: float) -> np.ndarray:
        router = routers._router(states, 32, skew, locality, np.random.default_rng(1))
        return np.argsort(states @ router.T, axis=1)[:, -4:]

    def most_popular(choice: np.ndarray) -> float:
        return float(np.bincount(choice.ravel(), minlength=32).max() / choice.size)

    def alike(choice: np.ndarray) -> float:
        pairs = zip(choice[:-1].tolist(), choice[1:].tolist(), strict=True)
        return float(np.mean([len({*a} & {*b}) / 4 for a, b in pairs]))

    assert most_popular(chosen(2.0, 0.5)) > 1.5 * most_popular(chosen(0.0, 0.5))
    assert alike(chosen(0.0, 1.0)) > 1.2 * alike(chosen(0.0, 0.0))


def test_a_shape_is_written_as_it_is_read() -> None:
    shape = MixtureShape.parse("64x4")
    assert shape == MixtureShape(64, 4, skew=0.7, locality=0.5)
    assert MixtureShape.parse(str(shape)) == shape
    assert MixtureShape.parse("8x2,locality=0.25") == MixtureShape(8, 2, locality=0.25)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("64", "'64' is not a mixture of experts."),
        ("64x4,top=3", "'64x4,top=3' is not a mixture of experts."),
        ("4x4", "A mixture of 4 experts with 4 for each token is not possible."),
        ("1x1", "A mixture of 1 experts with 1 for each token is not possible."),
        ("64x4,locality=2", "The skew is 0.7, and the locality 2."),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        MixtureShape.parse(text)
    assert caught.value.what == what
