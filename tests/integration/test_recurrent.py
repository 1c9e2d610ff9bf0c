"""Models whose running states cannot branch: chains instead of trees, and the same text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import BackendError
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.kernels.products import quantized
from edgespec.llama.cache.chain_cache import ChainCache
from edgespec.llama.cache.states import StateStore
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod, method_for
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sizing.sizers import FixedSizer
from edgespec.speculation.tree import TokenTree
from tests.heads.files import WIDTH, write_target
from tests.passes import passes
from tests.tiny_hybrid import N_VOCAB, write_tiny_hybrid
from tests.tiny_mamba import write_mamba

PROMPT = "one two three one two three one two"

pytestmark = pytest.mark.usefixtures("chains")


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing computes branches here, as where EdgeSpec's own kernels were not compiled."""
    monkeypatch.setattr("edgespec.llama.runtime.context._new_branching", lambda: None)


@pytest.fixture(scope="module")
def mamba_path(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba with random weights and the default model's vocabulary: a real recurrent model."""
    return write_mamba(tmp_path_factory.mktemp("models") / "tiny-mamba.gguf", smol_path)


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_chains_give_the_text_of_plain_decoding(mamba_path: Path, draft: str) -> None:
    config = GenerationConfig(max_tokens=40)
    prompt = "one two three one two three one two"
    with edgespec.load(mamba_path, draft="none", context=256) as engine:
        plain = engine.generate(prompt, config, raw=True)
    drafter = mamba_path if draft == "itself" else draft
    with edgespec.load(mamba_path, draft=drafter, tree_budget=8, context=256) as engine:
        answer = engine.generate(prompt, config, raw=True)
        again = engine.generate(prompt, config, raw=True)
        assert any("running state" in note for note in engine.notes)
    assert answer.tokens == again.tokens == plain.tokens
    assert max(record.nodes for record in answer.passes) > 1


def test_exact_is_refused_with_the_reason(mamba_path: Path) -> None:
    with pytest.raises(BackendError, match="keeps a running state") as error:
        edgespec.load(mamba_path, exact=True)
    assert error.value.hint == "Use exact=False."


@pytest.fixture
def engine(mamba_path: Path) -> Iterator[Engine]:
    with edgespec.load(mamba_path, draft="none", context=256) as engine:
        yield engine


def test_many_requests_are_answered_one_after_the_other(mamba_path: Path) -> None:
    config = GenerationConfig(max_tokens=8)
    prompts = [PROMPT, PROMPT + " three", "one", PROMPT * 3]
    with edgespec.load(mamba_path, draft="lookup", tree_budget=6, context=256) as engine:
        expected = [engine.generate(prompt, config, raw=True).tokens for prompt in prompts]
        assert [a.tokens for a in engine.generate_many(prompts, config, raw=True)] == expected
        assert engine.generate(PROMPT, config, raw=True).tokens == expected[0]


@pytest.mark.parametrize("target_is_hybrid", [True, False])
def test_no_pass_has_several_sequences_of_a_running_state(
    target_is_hybrid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several texts, branches by sequence ids and the padding of exact passes would be further sequences.

    With some kernel layouts, llama.cpp computes all but the first of them wrongly; see `Model`.
    """
    start_backend()
    hybrid = write_tiny_hybrid(tmp_path / "hybrid.gguf", 1, partial(quantized, 1))
    target = hybrid
    if not target_is_hybrid:
        rng = np.random.default_rng(1)
        embedding = rng.standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
        target = write_target(tmp_path / "dense.gguf", embedding, rng)
    seen: list[set[int]] = []
    decode = Context.decode

    def watched(context: Context, batch: TokenBatch) -> None:
        if context.model.keeps_recurrent_state:
            seen.append(set(batch.sequence_ids.tolist()))
            assert len(seen[-1]) == 1
        decode(context, batch)

    monkeypatch.setattr(Context, "decode", watched)
    config = GenerationConfig(max_tokens=12)
    with edgespec.load(target, draft=hybrid, context=256, parallel=4, learn=False) as engine:
        for decisions in (Decisions(), Decisions(drafting=True)):
            engine.speculator.decisions = decisions
            engine.generate(PROMPT, config, raw=True)
            engine.generate_many([PROMPT, "one two", "three"], config, raw=True)
    assert seen


def test_a_pass_of_one_node_saves_no_state(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = engine.target.context.save
    monkeypatch.setattr(engine.target.context, "save", lambda sequence: saved.append(1) or save(sequence))
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=20), raw=True)
    assert len(answer.passes) == 20
    assert saved == [], "nothing of one node can be rejected"
    sizer = FixedSizer(TreeLimits(budget=3, leaves=1))
    list(passes(engine, [*engine.encoder.encode(PROMPT, raw=True)], _guessing(engine), 6, sizer))
    assert saved, "a guess can"


def _guessing(engine: Engine) -> DecodingMethod:
    """Drafts that are always wrong."""

    class Wrong(NoDrafter):
        def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
            return TokenTree.chain([text[-1], 7, 7][: 1 + limits.depth])

    engine.target.rewind(0)
    engine.drafter = Wrong()
    return method_for(GenerationConfig(), engine.target.model.vocabulary.n_tokens, 0, engine.drafter)


def test_the_state_of_a_longer_text_is_filed_under_no_shorter_name(engine: Engine, tmp_path: Path) -> None:
    text = engine.encoder.encode(PROMPT, raw=True)
    answer = engine.generate(text, GenerationConfig(max_tokens=12))
    store = StateStore(CheckedFiles(tmp_path), "any")
    held = list(engine.target.tokens)
    assert len(held) > len(text)
    assert engine.target.save_state(store, text) == 0, "the state has gone on behind the text"
    assert list(tmp_path.iterdir()) == []
    assert engine.target.save_state(store, [*text, *answer.tokens]) == len(held)
    (path,) = tmp_path.iterdir()
    assert engine.target.save_state(store, text) == 0
    assert list(tmp_path.iterdir()) == [path], "what is kept of a beginning stays"
    assert isinstance(engine.target.cache, ChainCache)
    with pytest.raises(ValueError, match=f"not that of 0 .. {len(text)}"):
        engine.target.cache.save(0, len(text))
    # What was kept is the state of the text in its name.
    engine.target.rewind(0)
    engine.target.stores.append(store)
    continued = engine.generate([*text, *answer.tokens], GenerationConfig(max_tokens=12))
    engine.target.stores.clear()
    engine.target.rewind(0)
    assert (
        engine.generate([*text, *answer.tokens], GenerationConfig(max_tokens=12)).tokens == continued.tokens
    )
