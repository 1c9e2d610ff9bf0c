"""Models with running states: trees in one pass, and the text of plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import TextSequence
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.kernels.layouts import available_layouts
from edgespec.kernels.report_store import ensure_report, layouts_in_use
from edgespec.kernels.setting import PLAIN, VARIABLE, setting_of
from edgespec.llama.cache.state_cache import N_SEQUENCES, StateCache
from edgespec.llama.cache.states import StateStore
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.state_trees import BranchExactness, try_branches
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import TokenTree
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except
from tests.tiny import write_tiny
from tests.tiny_hybrids import HYBRIDS

PROMPT = [40 + i % 7 for i in range(70)]  # more than one piece in exact mode
CONFIGS = [
    GenerationConfig(max_tokens=24),
    GenerationConfig(max_tokens=24, temperature=0.9, top_p=0.95, seed=3),
]


@pytest.fixture(scope="session")
def hybrids(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture, with random weights."""
    folder = tmp_path_factory.mktemp("hybrids")
    return {
        name: write_tiny(folder / f"{name}.gguf", name, smol_path, kind=kind)
        for name, kind in HYBRIDS.items()
    }


class Knowing(NoDrafter):
    """Drafts what the target will say, but always beside a wrong token that is tried first.

    Args:
        texts: whole texts, of which one is being written.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        known = next((known for known in self.texts if known[: len(text)] == list(text)), list(text))
        coming = known[len(text) : len(text) + min(limits.depth, 4)]
        tokens, parents, above = [text[-1]], [-1], 0
        for place, token in enumerate(coming):
            wrong = len(tokens)
            tokens += [(token + 5) % 900, token]
            parents += [above, above]
            if place % 2:  # deeper below the wrong one, so that the order is not that of the levels
                tokens.append((token + 9) % 900)
                parents.append(wrong)
            above = wrong + 1
        if len(coming) == 4:  # the last one is never what the target says
            tokens[above] = (tokens[above] + 3) % 900
        return TokenTree.build(tokens, parents, [0.0] * len(tokens)).trimmed(limits.budget)


def answers(engine: Engine) -> list[list[int]]:
    return [engine.generate(PROMPT, config).tokens for config in CONFIGS]


@pytest.fixture(params=slow_except(["qwen35", "falcon-h1"], HYBRIDS))
def path(hybrids: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return hybrids[request.param]


@pytest.mark.parametrize("threads", [1, 2])
def test_each_branch_is_what_its_path_is_alone(path: Path, threads: int) -> None:
    start_backend()
    with Model(path) as model:
        context = open_context(model, threads)
        assert context.branches
        assert try_branches(context) is BranchExactness.SAME


def test_each_kernel_layout_computes_branches(
    hybrids: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_backend()
    working = layouts_in_use([layout.name for layout in available_layouts()], ensure_report())
    for name in [None, *working]:
        monkeypatch.setenv(VARIABLE, PLAIN if name is None else setting_of(name))
        with Model(hybrids["qwen35"]) as model:
            assert model.layouts == (() if name is None else (name,))
            assert try_branches(open_context(model)) is BranchExactness.SAME


def test_branches_are_wrong_where_nothing_computes_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_backend()
    decode = Context.decode
    monkeypatch.setattr(
        Context, "decode", lambda c, batch: decode(c, dataclasses.replace(batch, branches=None))
    )
    with Model(path) as model:
        assert try_branches(open_context(model)) is BranchExactness.WRONG


def open_context(model: Model, threads: int = 1) -> Context:
    return Context(
        model,
        n_cells=256,
        n_rows=64,
        n_outputs=64,
        n_sequences=N_SEQUENCES,
        n_threads=threads,
        branching=True,
    )


@pytest.mark.parametrize("offload", ["none", "stream"])
def test_the_text_is_that_of_plain_decoding(path: Path, offload: str) -> None:
    options: dict[str, Any] = {"draft": "none", "exact": True, "context": 192, "threads": 1}
    load = load_in_least_memory if offload == "stream" else edgespec.load
    with edgespec.load(path, **options) as engine:
        plain = answers(engine)
    with load(path, **options, **({"offload": offload} if offload == "stream" else {})) as engine:
        assert isinstance(engine.target.cache, StateCache)
        assert answers(engine) == plain
        engine.drafter = Knowing([[*PROMPT, *text] for text in plain])
        engine.speculator.decisions = Decisions(drafting=True)
        found = [engine.generate(PROMPT, config) for config in CONFIGS]
        assert [answer.tokens for answer in found] == plain
        # All of what is accepted stands second, so none of it is on the first path of its tree.
        assert all(answer.tokens_per_pass > 2 for answer in found)


def test_single_experts_of_a_hybrid_are_streamed(hybrids: dict[str, Path]) -> None:
    options: dict[str, Any] = {"draft": "none", "exact": True, "context": 192, "threads": 1}
    with edgespec.load(hybrids["qwen35moe"], **options) as engine:
        plain = answers(engine)
    with load_in_least_memory(hybrids["qwen35moe"], **options) as engine:
        assert engine.target.model.weights.expert_use is not None
        engine.drafter = Knowing([[*PROMPT, *text] for text in plain])
        engine.speculator.decisions = Decisions(drafting=True)
        found = [engine.generate(PROMPT, config) for config in CONFIGS]
    assert [answer.tokens for answer in found] == plain
    assert all(answer.tokens_per_pass > 2 for answer in found)


@pytest.fixture(params=slow_except(["qwen35", "lfm2"], ["qwen35", "lfm2", "mamba2"]))
def engine(hybrids: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Drafts for the answers to PROMPT, as they are without a drafter."""
    with edgespec.load(
        hybrids[request.param], draft="none", exact=True, context=192, threads=1, kv="q8_0"
    ) as engine:
        texts = [[*PROMPT, *engine.generate(PROMPT, c.with_(max_tokens=48)).tokens] for c in CONFIGS]
        engine.target.rewind(0)
        engine.drafter = Knowing(texts)
        engine.speculator.decisions = Decisions(drafting=True)
        yield engine


def known(engine: Engine, number: int) -> list[int]:
    drafter = engine.drafter
    assert isinstance(drafter, Knowing)
    return drafter.texts[number]


def test_a_text_continues_where_it_was_left(engine: Engine) -> None:
    for number, config in enumerate(CONFIGS):
        whole = known(engine, number)
        half = engine.generate(whole[:70], config.with_(max_tokens=20)).tokens
        assert half == whole[70:90]
        target = engine.target
        assert target.cache.length > 80, "what was read stays"
        more = engine.generate(whole[:90], config)
        if config.temperature == 0:
            assert more.tokens == whole[90:114]


def test_what_is_saved_is_restored(engine: Engine, tmp_path: Path) -> None:
    whole, store = known(engine, 0), StateStore(CheckedFiles(tmp_path), "any")
    engine.generate(PROMPT, CONFIGS[0])
    engine.target.stores.append(store)
    kept = engine.target.save_state(store, whole)
    assert len(PROMPT) < kept < len(PROMPT) + CONFIGS[0].max_tokens, "pending tokens have no state yet"
    engine.target.stores.clear()
    engine.target.rewind(0)
    engine.target.prefill(TextSequence(whole[:10]))  # another text in between
    engine.target.stores.append(store)
    assert engine.target.recall(TextSequence(whole[:94])) == kept
    assert engine.generate(whole[:94], CONFIGS[0]).tokens == whole[94:118]


def test_the_context_can_be_filled(engine: Engine) -> None:
    engine.drafter = NoDrafter()
    config = GenerationConfig(max_tokens=500)
    plain = engine.generate(PROMPT, config)
    engine.target.rewind(0)
    engine.drafter = Knowing([[*PROMPT, *plain.tokens]])
    found = engine.generate(PROMPT, config)
    assert found.tokens == plain.tokens
    assert found.tokens_per_pass > 2


def test_many_requests_are_answered_one_after_the_other(engine: Engine) -> None:
    assert engine.target.max_sequences == 1
    found = engine.generate_many([PROMPT, PROMPT[:40], PROMPT], CONFIGS[0], raw=True)
    expected = known(engine, 0)[70:94]
    assert found[0].tokens == found[2].tokens == expected


def test_long_pieces_of_a_prompt_give_the_same_state(
    hybrids: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # with EdgeSpec's own, no length need be tried
    prompt = np.random.default_rng(2).integers(40, 900, 700).tolist()
    options: dict[str, Any] = {"draft": "none", "exact": True, "context": 1024, "threads": 1}
    with edgespec.load(hybrids["qwen35"], **options) as engine:
        engine.target.pieces = None
        plain = engine.generate(prompt, CONFIGS[0]).tokens
    with load_in_least_memory(hybrids["qwen35"], **options) as engine:
        pieces = engine.target.pieces
        assert pieces is not None
        assert engine.generate(prompt, CONFIGS[0]).tokens == plain
        engine.target.rewind(0)
        assert pieces.is_proven(engine.target.prompt_rows), "long pieces are exact here"
        assert engine.generate(prompt, CONFIGS[0]).tokens == plain


def test_a_pass_that_fails_leaves_the_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cache = known(engine, 0), engine.target.cache
    engine.generate(PROMPT, CONFIGS[0].with_(max_tokens=10))
    held = cache.length
    decode = Context.decode

    def fails(context: Context, batch: TokenBatch) -> None:
        decode(context, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(Context, "decode", fails)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(whole[:79], CONFIGS[0])
    monkeypatch.undo()
    assert engine.target.tokens, "the state of before the pass is still there"
    assert held - len(engine.target.tokens) < 8
    assert engine.generate(whole[:80], CONFIGS[0]).tokens == whole[80:104]
