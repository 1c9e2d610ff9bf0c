"""Assistants of Gemma 4: they compute what NumPy does in their target's cells, and change no text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target
from edgespec.errors import BackendError, ModelFileError, PairingError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.heads.assistant import AssistantContext
from edgespec.heads.assistant_drafter import AssistantDrafter, GrowingTree
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.runtime.context import NoRoomInCache
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import ContextShape, PairSizes
from edgespec.speculation.growth import Children, Frontier
from tests.head_answers import (
    GREEDY,
    PROMPT,
    SAMPLED,
    UNDRAFTED,
    check_cancelled_answer,
    check_own_text,
    check_streamed,
    check_trees_branch,
    texts_of,
)
from tests.head_answers import opened as exactly_opened
from tests.heads.eagle_file import FloatArray
from tests.heads.gemma_files import write_gemma
from tests.heads.gemma_reference import GemmaShape, ReadTokens
from tests.least_memory import load_in_least_memory
from tests.tiers import examples
from tests.tiny import add_vocabulary, write_tiny
from tests.tiny_assistant import ASSISTANT, TARGET, TinyPair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, smol_path: Path) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("assistant"), smol_path)


def opened(pair: TinyPair, load: Callable[..., Engine] = edgespec.load, **changes: Any) -> Engine:
    """An engine for short texts, which decodes exactly if no change says otherwise."""
    return exactly_opened(pair.target, load, **{"draft": str(pair.assistant), **changes})


@pytest.fixture(scope="module")
def texts(pair: TinyPair) -> dict[GenerationConfig, list[int]]:
    """The text of the target without drafts."""
    return texts_of(pair.target, 96)


@pytest.fixture(scope="module")
def engine(pair: TinyPair) -> Iterator[Engine]:
    with opened(pair) as engine:
        yield engine


@dataclass(frozen=True)
class Step:
    """A draft step below a text: tokens, the features before them, and the logits (rows, n_vocab) after."""

    text: list[int]
    is_root: bool
    tokens: list[int]
    features: FloatArray
    logits: FloatArray


def noted_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The draft steps that are taken from now on, each tree's part in one of its own."""
    found: list[Step] = []
    expand = GrowingTree.expand

    def note(self: GrowingTree, frontier: Frontier, logits: FloatArray) -> Children:
        features = self.features_before(frontier)
        root = frontier.nodes.tolist() == [0]
        found.append(Step(self.candidates.text, root, frontier.tokens.tolist(), features, logits.copy()))
        return expand(self, frontier, logits)

    monkeypatch.setattr(GrowingTree, "expand", note)
    return found


def check_steps(pair: TinyPair, steps: Sequence[Step]) -> None:
    """Compare draft steps with what NumPy computes of their texts alone."""
    texts: list[tuple[list[int], ReadTokens]] = []
    for step in sorted(steps, key=lambda step: -len(step.text)):
        text = step.text[:-1]
        longer = next((read for tokens, read in texts if tokens[: len(text)] == text), None)
        if longer is None:
            longer = pair.target_reference.read(text)
            texts.append((text, longer))
        read = longer.first(len(text))
        if step.is_root:
            state = read.states[-1]
            assert np.abs(step.features - state).max() < 1e-2 * np.abs(state).max()
        expected, _ = pair.assistant_reference.draft(read, step.tokens, step.features)
        assert np.abs(step.logits - expected).max() < 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_targets_own(
    engine: Engine, texts: dict[GenerationConfig, list[int]], config: GenerationConfig
) -> None:
    check_own_text(engine, texts, config)


@pytest.mark.parametrize(
    "config", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_drafts_in_the_middle_of_an_answer_are_those_of_numpy(
    pair: TinyPair, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted rows are seen, rejected ones are not, and cells that were moved are found where they are."""
    steps = noted_steps(monkeypatch)
    commit = Target.commit

    def move_cells(self: Target, trees: Any, paths: Any) -> None:
        commit(self, trees, paths)
        assert isinstance(self.cache, BranchingCache)
        self.cache.compact()

    with opened(pair) as engine:
        engine.generate(PROMPT, config)
        monkeypatch.setattr(Target, "commit", move_cells)
        engine.generate([*PROMPT[:50], 5, 6, 7], config)
        assert engine.target.cache.compactions > 0
    monkeypatch.setattr(Target, "commit", commit)
    assert len(steps) > 20
    check_steps(pair, steps[:: max(2, len(steps) // examples(80))])


def test_trees_branch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trees_branch(engine, SAMPLED, monkeypatch)


def test_texts_share_passes(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT[start : start + 30] for start in (0, 5, 11)]
    with opened(pair, **UNDRAFTED) as engine:
        expected = [engine.generate(prompt, GREEDY).tokens for prompt in prompts]
    steps = noted_steps(monkeypatch)
    with opened(pair, parallel=3) as engine:
        answers = engine.generate_many(prompts, GREEDY)
        assert [answer.tokens for answer in answers] == expected
        assert sum(answer.tokens_per_pass for answer in answers) > 3.3
    assert {tuple(step.text[:30]) for step in steps} == {tuple(prompt) for prompt in prompts}
    check_steps(pair, steps[:: max(2, len(steps) // examples(40))])


def test_sources_are_merged_and_trees_drawn(pair: TinyPair, texts: dict[GenerationConfig, list[int]]) -> None:
    with opened(pair, drafter="merged") as engine:
        assert engine.drafter.name == "assistant, prompt lookup, token recycling"
        assert engine.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]
    with opened(pair, exact=None) as engine:
        drawn = engine.generate(PROMPT, SAMPLED.with_(verify="block", seed=1))
        assert drawn.tokens_per_pass > 1.1


def test_weights_that_are_streamed(pair: TinyPair, texts: dict[GenerationConfig, list[int]]) -> None:
    with opened(pair, load_in_least_memory) as engine:
        check_streamed(engine, texts)


def test_keys_and_values_in_eight_bits(pair: TinyPair) -> None:
    with opened(pair, kv="q8_0", **UNDRAFTED) as engine:
        expected = engine.generate(PROMPT, GREEDY).tokens
    with opened(pair, kv="q8_0") as engine:
        answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == expected
    assert answer.tokens_per_pass > 1.3


def test_a_cancelled_answer_continues(engine: Engine, texts: dict[GenerationConfig, list[int]]) -> None:
    check_cancelled_answer(engine, texts)


def test_a_draft_step_that_is_interrupted(
    engine: Engine, texts: dict[GenerationConfig, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = AssistantContext.draft
    calls = 0

    def interrupted(self: AssistantContext, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return draft(self, *arguments)

    monkeypatch.setattr(AssistantContext, "draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, GREEDY)
    monkeypatch.undo()
    answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == texts[GREEDY][:32]
    assert answer.tokens_per_pass > 1.3


def test_where_no_cells_are_free_nothing_is_drafted(
    engine: Engine, texts: dict[GenerationConfig, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: AssistantContext, *arguments: Any) -> Any:
        raise NoRoomInCache(self.n_cells)

    monkeypatch.setattr(AssistantContext, "draft", full)
    answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == texts[GREEDY][:32]
    assert answer.tokens_per_pass == 1


def test_a_text_that_was_restored_is_drafted_for_after_a_pass(pair: TinyPair) -> None:
    with opened(pair, prompt_cache=True) as engine:
        expected = engine.generate([*PROMPT, *PROMPT], GREEDY).tokens
    with opened(pair, prompt_cache=True) as engine:
        answer = engine.generate([*PROMPT, *PROMPT], GREEDY)
    assert answer.tokens == expected
    assert answer.tokens_per_pass > 1.1


def test_steps_are_timed(engine: Engine) -> None:
    assert isinstance(engine.drafter, AssistantDrafter)
    assert engine.drafter.step_seconds(1) > 0
    assert engine.drafter.step_seconds(8) > 0


def test_the_size_of_trees_follows_from_costs(
    pair: TinyPair, texts: dict[GenerationConfig, list[int]]
) -> None:
    with opened(pair, tree_budget=None, drafter=None) as engine:
        assert engine.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]


def test_the_budget_counts_the_assistant(pair: TinyPair) -> None:
    target, assistant = (ModelFiles.of(read_header(path)) for path in (pair.target, pair.assistant))
    shape = ContextShape(512, n_outputs=64, n_sequences=64)
    alone, both = (PairSizes(target, drafter, shape, measured=True).at(64) for drafter in (None, assistant))
    assert both.footprints[1].weights == assistant.tensor_bytes
    assert both.footprints[1].cache == 0, "the cells are the target's"
    assert both.footprints[1].buffers > 0
    assert both.footprints[0].buffers > alone.footprints[0].buffers


def written(path: Path, shape: GemmaShape, vocabulary_of: Path, without: str = "") -> Path:
    """A model or an assistant with random weights, without one of its tensors."""
    weights = shape.random(np.random.default_rng(1))
    weights.pop(without, None)
    return write_gemma(path, shape, weights, lambda writer: add_vocabulary(writer, vocabulary_of))


def test_assistants_of_other_targets_are_refused(pair: TinyPair, smol_path: Path, tmp_path: Path) -> None:
    llama = write_tiny(tmp_path / "llama.gguf", "llama", smol_path)
    others = [(llama, "it drafts for the architecture gemma4, not llama")]
    for name, shape, fault in (
        ("width", replace(TARGET, width=320), "it reads states of 256 elements, not 320"),
        (
            "heads",
            replace(TARGET, heads_kv=4),
            "it looks at 2 heads of 32 elements in layer 4",
        ),
        ("last", replace(TARGET, sliding=TARGET.sliding[::-1]), "which must be the last two"),
    ):
        (tmp_path / name).mkdir()
        others.append((written(tmp_path / name / "target.gguf", shape, smol_path), fault))
    for target, fault in others:
        with pytest.raises(PairingError, match="was made for another target") as caught:
            edgespec.load(target, draft=str(pair.assistant))
        assert fault in caught.value.what
        assert "Name the assistant that was made for this model" in caught.value.hint


def test_a_damaged_assistant_is_refused(pair: TinyPair, smol_path: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "damaged.gguf", ASSISTANT, smol_path, without="nextn.post_projection.weight")
    with pytest.raises(ModelFileError, match=r"post_projection\.weight is missing instead of"):
        edgespec.load(pair.target, draft=str(path))


def test_an_assistant_is_no_model(pair: TinyPair) -> None:
    with pytest.raises(UsageError, match=r"assistant\.gguf is a draft head"):
        edgespec.load(pair.assistant)


def test_closing_ends_both(pair: TinyPair) -> None:
    engine = opened(pair)
    engine.generate(PROMPT[:20], GREEDY)
    engine.target.model.close()
    assert isinstance(engine.drafter, AssistantDrafter)
    with pytest.raises(BackendError, match="closed"):
        engine.drafter.step_seconds(1)
    engine.close()


def test_threads_may_ask_at_once(pair: TinyPair, texts: dict[GenerationConfig, list[int]]) -> None:
    found: list[list[int]] = []
    with opened(pair, parallel=2) as engine:
        threads = [
            threading.Thread(target=lambda: found.append(engine.generate(PROMPT, GREEDY).tokens))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [texts[GREEDY][:32]] * 2


def test_the_assistant_from_the_command_line(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "-p", "one two", "--context", "256", "--max-tokens", "8"]
    assert main([*command, "--draft", str(pair.assistant), "--json", str(pair.target)]) == 0
    assert '"completion_tokens": 8' in capsys.readouterr().out
    assert main(["models", "show", str(pair.assistant)]) == 0
    shown = capsys.readouterr().out
    assert "draft head" in shown
    assert "does not draft" not in shown
    assert main(["plan", str(pair.target), "--draft", str(pair.assistant)]) == 0
    assert "assistant" in capsys.readouterr().out
    assert main(["models", "pair", str(pair.target), str(pair.assistant)]) == 0
