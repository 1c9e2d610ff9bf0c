"""Two engines of one process, loaded and used at the same time: each is what it is alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.errors import EdgeSpecError, ModelFileError
from edgespec.generation.config import GenerationConfig
from edgespec.kernels.layouts import kernel_layouts
from edgespec.kernels.setting import SETTINGS, VARIABLE
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from tests.fuzz.headers import small_model
from tests.tiny import write_tiny
from tests.tiny_hybrids import HYBRIDS

_ROUNDS = 4
_TOKENS = 12


@pytest.fixture(scope="module")
def hybrid(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with layers of attention and layers that keep a running state."""
    folder = tmp_path_factory.mktemp("hybrid")
    return write_tiny(folder / "qwen35.gguf", "qwen35", smol_path, kind=HYBRIDS["qwen35"])


def answers(path: Path, *, rounds: int = 1, meet: threading.Barrier | None = None) -> list[bytes]:
    """The logits of some tokens, after each of several loads; both sides begin each load together."""
    found = []
    for _ in range(rounds):
        if meet is not None:
            meet.wait()
        with Model(path) as model:
            context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=2)
            tokens = np.random.default_rng(0).integers(3, model.vocabulary.n_tokens, _TOKENS)
            for position, token in enumerate(tokens.tolist()):
                context.decode(TokenBatch.run([token], position, n_sequences=1, logits="all"))
                found.append(context.logits().tobytes())
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_loads_and_passes_of_two_engines_change_no_bit_of_each_other(
    setting: str, hybrid: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    start_backend()
    try:
        kernel_layouts()
    except EdgeSpecError:
        pytest.skip(f"this processor has no {setting} kernels")
    alone = {path: answers(path) for path in (hybrid, short_path)}
    meet = threading.Barrier(len(alone))
    with ThreadPoolExecutor(len(alone)) as pool:
        running = {path: pool.submit(answers, path, rounds=_ROUNDS, meet=meet) for path in alone}
        for path, answer in running.items():
            assert answer.result() == alone[path] * _ROUNDS


def test_engines_that_are_loaded_and_answer_at_once_give_the_answers_they_give_alone(
    hybrid: Path, short_path: Path
) -> None:
    start_backend()
    config = GenerationConfig(max_tokens=8, logprobs=3)

    def answer(path: Path, rounds: int = 1) -> list[object]:
        found: list[object] = []
        for _ in range(rounds):
            with edgespec.load(path, draft="none", context=256, threads=1, exact=False) as engine:
                found += [engine.generate("one two three", config, raw=True) for _ in range(2)]
        return [(each.tokens, each.logprobs) for each in found]

    alone = {path: answer(path) for path in (hybrid, short_path)}
    with ThreadPoolExecutor(len(alone)) as pool:
        running = {path: pool.submit(answer, path, rounds=2) for path in alone}
        for path, answered in running.items():
            assert answered.result() == alone[path] * 2


def test_each_load_is_explained_by_its_own_log(smol_path: Path, tmp_path: Path) -> None:
    start_backend()
    paths = {}
    for name in ("first-unknown", "second-unknown"):
        header = small_model(smol_path)
        header.change("general.architecture", name.encode())
        paths[name] = tmp_path / f"{name}.gguf"
        paths[name].write_bytes(header.to_bytes())
    meet = threading.Barrier(len(paths))

    def errors(path: Path) -> set[str]:
        found = set()
        for _ in range(20):
            meet.wait()
            with pytest.raises(ModelFileError) as caught:
                Model(path, vetted=False, repack=False)
            found.add(caught.value.what)
        return found

    with ThreadPoolExecutor(len(paths)) as pool:
        told = dict(zip(paths, pool.map(errors, paths.values()), strict=True))
    for name, messages in told.items():
        assert len(messages) == 1
        assert f"unknown model architecture: '{name}'" in messages.pop()
