"""Draft heads: what they compute is what NumPy computes, and they draft without changing the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import BackendError, PairingError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.heads.head_drafter import HeadDrafter
from edgespec.heads.head_sequence import HeadSequence
from edgespec.heads.hidden_states import LayerTap
from edgespec.llama.runtime import nextn
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.tree import FloatArray
from tests.head_answers import (
    GREEDY,
    PROMPT,
    SAMPLED,
    UNDRAFTED,
    Texts,
    check_budget,
    check_cancelled_answer,
    check_commands,
    check_own_text,
    check_profile,
    check_restored_text,
    check_several_texts,
    check_streamed,
    check_unknown_text,
    opened,
    texts_of,
)
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except
from tests.tiny import ARCHITECTURES, N_EMBD, write_tiny
from tests.tiny_heads import LAYERS, TinyPair, tiny_head, write_pair
from tests.tiny_hybrids import HYBRIDS


@pytest.fixture(scope="module")
def pair(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"), smol_path)


@pytest.fixture(scope="module")
def texts(pair: TinyPair) -> Texts:
    return texts_of(pair.target)


@pytest.fixture(scope="module")
def engine(pair: TinyPair) -> Iterator[Engine]:
    with opened(pair.target, draft=pair.head) as engine:
        yield engine


def drafter_of(engine: Engine) -> HeadDrafter:
    assert isinstance(engine.drafter, HeadDrafter)
    return engine.drafter


@dataclass(frozen=True)
class Step:
    """A draft step: the text, the nodes that were read, and the logits (nodes, n_vocab) after each."""

    text: list[int]
    frontier: Frontier
    logits: FloatArray


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The draft steps that are made from now on, of texts whose beginning the head has seen."""
    seen: list[Step] = []
    ranked = HeadSequence.ranked

    def note(self: HeadSequence, frontier: Frontier, rows: list[int], logits: FloatArray) -> Children:
        assert rows == list(range(len(frontier.nodes))), "there is room for all nodes"
        seen.append(Step([self.known_sequence[0], *self._sequence], frontier, logits.copy()))
        return ranked(self, frontier, rows, logits)

    monkeypatch.setattr(HeadSequence, "ranked", note)
    return seen


def features_of(pair: TinyPair, text: Sequence[int]) -> FloatArray:
    """The features of a text that is read at once, computed by NumPy."""
    tap = LayerTap(LAYERS, N_EMBD)
    with Model(pair.target, repack=False) as model:
        sizes = {"n_cells": 256, "n_rows": 256, "n_outputs": 4, "n_sequences": 1, "n_threads": 1}
        context = Context(model, observers=[tap], **sizes)
        context.decode(TokenBatch.run(text, 0, 1, "last"))
        return pair.reference.encode(tap.rows())


def test_trees_are_those_of_numpy(pair: TinyPair, engine: Engine, steps: list[Step]) -> None:
    engine.target.rewind(0)
    answer = engine.generate(PROMPT, GREEDY.with_(max_tokens=12))
    assert answer.tokens_per_pass > 1.5, "there are accepted rows, which are read again"
    whole = [*PROMPT, *answer.tokens]
    features = features_of(pair, whole)
    deepest = 0
    for text in {tuple(step.text): None for step in steps}:
        known = list(text)
        assert known == whole[: len(known)]
        rows = known[1:]  # row r holds token r + 1 and feature r
        parents, at, found = list(range(-1, len(rows) - 1)), {0: len(rows) - 1}, []
        for step in (step for step in steps if tuple(step.text) == text):
            f = step.frontier
            for place, node in enumerate(f.nodes.tolist()):
                if node:
                    at[node] = len(rows)
                    rows.append(int(f.tokens[place]))
                    parents.append(at[int(f.parents[place])])
                found.append((at[node], step.logits[place]))
                deepest = max(deepest, int(f.depths[place]))
        expected, _ = pair.reference.tree(rows, parents, features[: len(known) - 1])
        for row, logits in found:
            worst = np.abs(logits[pair.drafted] - expected[row]).max()
            assert worst < 0.02 * np.abs(expected[row]).max()
            assert np.isneginf(np.delete(logits, pair.drafted)).all()
    assert deepest >= 3


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_targets_own(engine: Engine, texts: Texts, config: GenerationConfig) -> None:
    check_own_text(engine, texts, config)


def test_drawn_trees_and_the_sources_without_a_model(pair: TinyPair, engine: Engine) -> None:
    with opened(pair.target, draft=pair.head, drafter="merged") as merged:
        assert merged.drafter.name == "head, prompt lookup, token recycling"
        assert merged.generate(PROMPT, GREEDY).tokens == engine.generate(PROMPT, GREEDY).tokens
    with opened(pair.target, draft=pair.head, exact=None) as free:
        drawn = free.generate(PROMPT, SAMPLED.with_(verify="block", seed=1))
        assert drawn.tokens_per_pass > 1.1


def test_several_texts_in_a_pass(engine: Engine) -> None:
    check_several_texts(engine, 1.3)


def test_texts_that_begin_alike_share_what_is_known(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    begin = HeadSequence.begin

    def note(self: HeadSequence, text: Sequence[int]) -> None:
        begun.append((self.unread, len(text)))
        begin(self, text)

    monkeypatch.setattr(HeadSequence, "begin", note)
    engine.target.rewind(0)
    drafter_of(engine).forget()
    prompts = [[*PROMPT, last] for last in (5, 6, 7)]
    answers = engine.generate_many(prompts, GREEDY)
    assert {unread for unread, _ in begun} == {1}, "all are known from their first token on"
    assert len({length for _, length in begun}) > 3
    monkeypatch.undo()
    assert [answer.tokens for answer in answers] == [engine.generate(p, GREEDY).tokens for p in prompts]


def test_texts_that_do_not_fit_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, [9, *PROMPT], [8, 9, *PROMPT]]
    expected = [engine.generate(prompt, GREEDY).tokens for prompt in prompts]
    cells = engine.target.context.n_cells
    monkeypatch.setattr("edgespec.heads.head_drafter._SPARE_CELLS", cells - 110)  # room for one of them
    monkeypatch.setattr(drafter_of(engine)._context, "n_cells", 140 + 2 * engine.speculator.limits.budget)
    answers = engine.generate_many(prompts, GREEDY)
    assert [answer.tokens for answer in answers] == expected
    assert max(answer.tokens_per_pass for answer in answers) > 1.2
    assert engine.generate(PROMPT, GREEDY).tokens == expected[0]


def test_weights_that_are_streamed(pair: TinyPair, texts: Texts) -> None:
    with opened(pair.target, load_in_least_memory, draft=pair.head) as engine:
        check_streamed(engine, texts)


def test_a_cancelled_answer_continues(engine: Engine, texts: Texts) -> None:
    check_cancelled_answer(engine, texts)


def test_a_text_that_was_restored_is_drafted_for_from_there_on(pair: TinyPair, steps: list[Step]) -> None:
    check_restored_text(pair.target, pair.head, steps.clear)


def test_a_text_of_which_nothing_is_known_gets_a_root(engine: Engine) -> None:
    check_unknown_text(engine, (1, 8))


def test_a_profile_counts_the_trees_of_real_passes(engine: Engine) -> None:
    check_profile(engine, 1.2)


def test_heads_of_other_targets_are_refused(pair: TinyPair, smol_path: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf", "gemma3", smol_path, damped=0.001)
    for changes, what in (
        ({"target_width": 64}, "it reads hidden states of 64 elements, not 256."),
        ({"layers": (1, 3, 6)}, "it reads the layers 1, 3, 6 (the first is 0), but there are 6."),
        ({"width": 128, "heads": 2, "heads_kv": 2}, "it has no matrix for its 128 elements"),
    ):
        head = tiny_head(tmp_path / "bad.gguf", smol_path, **changes)
        with pytest.raises(PairingError, match=r"was made for another target than tiny\.gguf") as caught:
            edgespec.load(pair.target, draft=head, context=128)
        assert what in caught.value.what
    with pytest.raises(UsageError, match=r"head\.gguf is a draft head, which only works with"):
        edgespec.load(pair.head)
    # Any architecture shows its hidden states.
    with opened(other, draft=pair.head, exact=False) as engine:
        assert len(engine.generate(PROMPT, GREEDY).tokens) > 1


def test_a_hybrid_target(pair: TinyPair, smol_path: Path, tmp_path: Path) -> None:
    hybrid = write_tiny(tmp_path / "h.gguf", "qwen35", smol_path, kind=HYBRIDS["qwen35"], damped=0.001)
    with opened(hybrid, **UNDRAFTED) as engine:
        expected = engine.generate(PROMPT, GREEDY).tokens
    with opened(hybrid, draft=pair.head) as engine:
        answer = engine.generate(PROMPT, GREEDY)
    assert answer.tokens == expected
    assert max(record.nodes for record in answer.passes) > 4


@pytest.mark.parametrize(
    "architecture", slow_except(["gemma2", "qwen3moe"], [*ARCHITECTURES, "gpt-oss", "glm4moe", "deepseek2"])
)
def test_architectures_show_their_hidden_states(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    tap = LayerTap(LAYERS, N_EMBD)
    path = write_tiny(tmp_path / "tiny.gguf", architecture, smol_path)
    sizes = {"n_cells": 256, "n_rows": 64, "n_outputs": 4, "n_sequences": 1, "n_threads": 1}
    with Model(path, repack=False) as model:
        context = Context(model, observers=[tap], **sizes)
        tap.require_rows(context)
        text = list(range(40, 60))
        context.decode(TokenBatch.run(text, 0, 1, "last"))
        whole, logits = tap.rows(), context.logits().copy()
        assert whole.shape == (20, len(LAYERS) * N_EMBD)
        assert np.abs(whole[:, :N_EMBD] - whole[:, N_EMBD : 2 * N_EMBD]).max() > 0
        plain = Context(model, **sizes)
        plain.decode(TokenBatch.run(text, 0, 1, "last"))
        assert (plain.logits() == logits).all(), "reading on the way changes nothing"


def test_the_budget_counts_the_head(pair: TinyPair) -> None:
    check_budget(pair.target, pair.head, layers=1, shown=len(LAYERS))


def test_a_build_without_heads_says_so(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nextn, "_NAMES", {"set": ("llama_set_something",)})
    nextn._function.cache_clear()
    with pytest.raises(
        BackendError, match=r"cannot draft with heads and MTP layers: it has no llama_set_something\."
    ):
        edgespec.load(pair.target, draft=pair.head, context=128)


def test_a_head_from_the_command_line(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    check_commands(pair.target, pair.head, "for the model that it was made for", "EAGLE-3", capsys)
