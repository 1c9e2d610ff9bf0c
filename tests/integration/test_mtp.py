"""Layers for multi-token prediction inside a target: they compute what NumPy does, and change no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.engine.engine import Engine
from edgespec.errors import BackendError, PairingError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.heads.head_context import HeadContext
from edgespec.heads.head_drafter import HeadDrafter
from edgespec.heads.hidden_states import LastStates
from edgespec.heads.mtp import read_mtp_file
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import ContextShape, PairSizes
from tests.head_answers import (
    GREEDY,
    PROMPT,
    SAMPLED,
    UNDRAFTED,
    check_answers,
    check_cancelled_answer,
    check_own_text,
    check_streamed,
    check_trees_branch,
    texts_of,
)
from tests.head_answers import opened as exactly_opened
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except
from tests.tiny import N_LAYER, write_tiny
from tests.tiny_hybrids import HYBRIDS
from tests.tiny_mtp import SHAPE, TinyMTP, write_mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def tiny(folder: Path, smol_path: Path) -> TinyMTP:
    return write_mtp(folder / "dense.gguf", "qwen35", smol_path)


@pytest.fixture(scope="module")
def mixture(folder: Path, smol_path: Path) -> TinyMTP:
    return write_mtp(folder / "mixture.gguf", "qwen35moe", smol_path)


@pytest.fixture(scope="module")
def without(folder: Path, smol_path: Path) -> Path:
    """A model like the first without the layer."""
    return write_tiny(folder / "without.gguf", "qwen35", smol_path, kind=HYBRIDS["qwen35"], damped=0.001)


def opened(target: Path, load: Callable[..., Engine] = edgespec.load, **changes: Any) -> Engine:
    """An engine for short texts, which decodes exactly if no change says otherwise."""
    return exactly_opened(target, load, **{"draft": "mtp", **changes})


@pytest.fixture(scope="module")
def texts(tiny: TinyMTP) -> dict[GenerationConfig, list[int]]:
    """The text of the target without drafts."""
    return texts_of(tiny.path)


@pytest.fixture(scope="module")
def engine(tiny: TinyMTP) -> Iterator[Engine]:
    with opened(tiny.path) as engine:
        yield engine


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_rows_are_those_of_numpy(architecture: str, folder: Path, smol_path: Path) -> None:
    path = folder / f"random-{architecture}.gguf"
    tiny = write_mtp(path, architecture, smol_path, damped=1.0, clever=False)
    tokens = [7 + 11 * i % 300 for i in range(12)]
    with Model(path, repack=False, mtp=True) as model:
        context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1)
        states = LastStates(SHAPE.width)
        states.attach(context)
        context.decode(TokenBatch.run(tokens, 0, 1, "all"))
        hidden = states.rows().copy()
        layer = HeadContext(model, n_cells=256, n_sequences=4, n_threads=1)
        rows = TokenBatch.run(tokens[1:], 0, 1, "all")
        layer.decode(replace(rows, features=hidden[:-1]))
        logits, features = layer.logits().copy(), layer.features(len(rows))
    expected, outputs = tiny.reference.tree(tokens[1:], range(-1, len(rows) - 1), hidden[:-1])
    assert np.abs(logits - expected).max() < 1e-2 * np.abs(expected).max()
    assert np.abs(features - outputs).max() < 1e-2 * np.abs(outputs).max()


def test_showing_the_last_states_changes_no_bit(tiny: TinyMTP) -> None:
    found = []
    for mtp in (False, True):
        with Model(tiny.path, mtp=mtp) as model:
            context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1)
            if mtp:
                LastStates(SHAPE.width).attach(context)
            context.decode(TokenBatch.run(PROMPT[:40], 0, 1, "none"))
            context.decode(TokenBatch.run(PROMPT[40:60], 40, 1, "last"))
            found.append(context.logits().copy())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_targets_own(
    engine: Engine, texts: dict[GenerationConfig, list[int]], config: GenerationConfig
) -> None:
    check_own_text(engine, texts, config)


def test_trees_branch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trees_branch(engine, GREEDY, monkeypatch)


def test_sources_are_merged_and_trees_drawn(tiny: TinyMTP, texts: dict[GenerationConfig, list[int]]) -> None:
    with opened(tiny.path, drafter="merged") as engine:
        assert engine.drafter.name == "MTP layer, prompt lookup, token recycling"
        assert engine.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]
    with opened(tiny.path, exact=None) as engine:
        drawn = engine.generate(PROMPT, SAMPLED.with_(verify="block", seed=1))
        assert drawn.tokens_per_pass > 1.1


@pytest.mark.slow
def test_a_mixture_of_experts(mixture: TinyMTP) -> None:
    expected = texts_of(mixture.path)
    with opened(mixture.path) as engine:
        for config in (GREEDY, SAMPLED):
            answer = engine.generate(PROMPT, config)
            assert answer.tokens == expected[config][: len(answer.tokens)]
            assert answer.tokens_per_pass > 1.3


@pytest.mark.parametrize("experts", slow_except(["auto"], ["auto", "never"]))
def test_a_mixture_that_is_streamed(mixture: TinyMTP, experts: str) -> None:
    usual = {**UNDRAFTED, "experts": experts}
    with opened(mixture.path, load_in_least_memory, **usual) as engine:
        expected = engine.generate(PROMPT, GREEDY).tokens
    with opened(mixture.path, load_in_least_memory, experts=experts) as engine:
        assert engine.target.model.weights.streamed_bytes > 0
        answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == expected
    assert answer.tokens_per_pass > 1.3


def test_weights_that_are_streamed(tiny: TinyMTP, texts: dict[GenerationConfig, list[int]]) -> None:
    with opened(tiny.path, load_in_least_memory) as engine:
        files = ModelFiles.of(read_header(tiny.path))
        assert len(files.layers()) == N_LAYER, "the layer that drafts is none of the target's"
        check_streamed(engine, texts)


def test_weights_that_the_system_pages(tiny: TinyMTP, texts: dict[GenerationConfig, list[int]]) -> None:
    with opened(tiny.path, offload="mmap") as engine:
        assert engine.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]


def test_a_cancelled_answer_continues(engine: Engine, texts: dict[GenerationConfig, list[int]]) -> None:
    check_cancelled_answer(engine, texts)


def test_a_text_that_was_restored_is_drafted_for_from_there_on(tiny: TinyMTP) -> None:
    with opened(tiny.path, prompt_cache=True) as engine:
        expected = engine.generate(PROMPT, GREEDY).tokens
    with opened(tiny.path, prompt_cache=True) as engine:
        answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == expected
    assert answer.tokens_per_pass > 1.1


def test_where_states_cannot_branch_chains_are_drafted(
    tiny: TinyMTP, texts: dict[GenerationConfig, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.llama.runtime.context._new_branching", lambda: None)
    with opened(tiny.path, exact=None) as engine:
        assert engine.target.max_leaves == 1
        answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == texts[GREEDY][:32]
    assert answer.tokens_per_pass > 1.3


def test_steps_are_timed(engine: Engine) -> None:
    assert isinstance(engine.drafter, HeadDrafter)
    assert engine.drafter.step_seconds(1) > 0
    assert engine.drafter.step_seconds(8) > 0


def test_auto_takes_the_layer(tiny: TinyMTP, mixture: TinyMTP, without: Path) -> None:
    for path, drafts in ((tiny.path, True), (mixture.path, True), (without, False)):
        with opened(path, draft="auto", drafter=None) as engine:
            assert isinstance(engine.drafter, HeadDrafter) == drafts
            assert ("Drafting with the target's own MTP layer." in engine.notes) == drafts


def test_the_budget_counts_the_layer(tiny: TinyMTP, without: Path) -> None:
    files, plain = (ModelFiles.of(read_header(path)) for path in (tiny.path, without))
    assert files.mtp is not None
    assert files.tensor_bytes == plain.tensor_bytes
    assert files.headers[0].block_count == N_LAYER
    shape = ContextShape(512, n_outputs=64, n_sequences=64)
    alone, both = (PairSizes(files, drafter, shape, measured=True).at(64) for drafter in (None, files.mtp))
    assert both.footprints[1].weights == files.mtp.tensor_bytes
    cells = 512 * 2 * 2 * SHAPE.heads_kv * SHAPE.head  # keys and values in half precision, of one layer
    assert cells <= both.footprints[1].cache <= 1.5 * cells
    assert both.footprints[0].buffers > alone.footprints[0].buffers
    assert both.footprints[0].weights == alone.footprints[0].weights


def test_a_model_without_the_layer_says_so(without: Path, smol_path: Path) -> None:
    for path in (without, smol_path):
        with pytest.raises(UsageError, match=r"it has no layer for multi-token prediction") as caught:
            edgespec.load(path, draft="mtp")
        assert caught.value.hint == "Leave out draft='mtp', or name a drafter."


def test_a_layer_that_the_build_cannot_compute(
    tiny: TinyMTP, folder: Path, smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.heads.mtp.ARCHITECTURES", frozenset())
    with pytest.raises(UsageError, match=r"llama\.cpp cannot compute MTP layers of the architecture qwen35"):
        edgespec.load(tiny.path, draft="mtp")
    monkeypatch.undo()
    monkeypatch.setattr("edgespec.heads.head_trial.support_fault", lambda: "it has no llama_set")
    with pytest.raises(BackendError, match=r"cannot draft with heads and MTP layers: it has no llama_set"):
        edgespec.load(tiny.path, draft="mtp")
    with opened(tiny.path, draft="auto", drafter=None) as engine:
        assert any(note.startswith("The target's own MTP layer does not draft") for note in engine.notes)


def test_a_layer_that_ends_the_process_is_refused(
    folder: Path, smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_mtp(folder / "two.gguf", "qwen35", smol_path, n_layers=2)
    with pytest.raises(UsageError, match=r"it has 2 MTP layers, and llama\.cpp computes one"):
        edgespec.load(tiny.path, draft="mtp")
    monkeypatch.setattr("edgespec.heads.mtp.SEVERAL", frozenset({"qwen35"}))
    with pytest.raises(UsageError, match=r"llama\.cpp fails on the layer \(abort\)") as caught:
        edgespec.load(tiny.path, draft="mtp")
    assert "Leave out draft='mtp'" in caught.value.hint
    with Model(tiny.path) as model, pytest.raises(BackendError, match="was loaded without its MTP layers"):
        HeadContext(model, n_cells=256, n_sequences=1, n_threads=1)


@pytest.fixture(scope="module")
def alone(folder: Path, smol_path: Path) -> Path:
    """The first model's layer in a file of its own."""
    return write_mtp(folder / "mtp-dense.gguf", "qwen35", smol_path, alone=True).path


def test_a_layer_in_a_file_of_its_own(
    without: Path, alone: Path, texts: dict[GenerationConfig, list[int]]
) -> None:
    """With its model's file, which lacks the layer."""
    with opened(without, draft=str(alone)) as engine:
        assert engine.drafter.name == "mtp-dense"
        check_answers(engine, texts)
    with opened(without, load_in_least_memory, draft=str(alone)) as engine:
        check_streamed(engine, texts)


def test_a_layer_alone_is_of_use_for_its_model_only(
    alone: Path, mixture: TinyMTP, smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"mtp-dense\.gguf is a draft head"):
        edgespec.load(alone)
    for target in (smol_path, mixture.path):
        with pytest.raises(PairingError, match=r"made for another target than .*its architecture is qwen35"):
            edgespec.load(target, draft=str(alone))
    assert main(["models", "show", str(alone)]) == 0
    assert "of a model in another file; use it with --draft" in " ".join(capsys.readouterr().out.split())


def test_the_budget_counts_a_layer_in_a_file_of_its_own(without: Path, alone: Path) -> None:
    files, layers = ModelFiles.of(read_header(without)), read_mtp_file([read_header(alone)])
    both = PairSizes(files, layers, ContextShape(512, n_outputs=64, n_sequences=64), measured=True).at(64)
    assert both.footprints[1].weights == read_header(alone).tensor_bytes
    cells = 512 * 2 * 2 * SHAPE.heads_kv * SHAPE.head
    assert cells <= both.footprints[1].cache <= 1.5 * cells


def test_the_layer_from_the_command_line(
    tiny: TinyMTP, without: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "-p", "one two", "--context", "256", "--max-tokens", "8", "--draft", "mtp"]
    assert main([*command, "--json", str(tiny.path)]) == 0
    assert '"completion_tokens": 8' in capsys.readouterr().out
    assert main([*command, str(without)]) == 2
    assert "has no layer for multi-token prediction" in " ".join(capsys.readouterr().err.split())
    assert main(["models", "show", str(tiny.path)]) == 0
    assert "MTP layer" in capsys.readouterr().out
    assert main(["plan", str(tiny.path), "--draft", "mtp"]) == 0
    assert "MTP layer" in capsys.readouterr().out
