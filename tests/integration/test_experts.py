"""Single experts that come and go: the same text as from memory, for mixtures of every make."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.planned_weights import HitRates
from edgespec.costs.planner import DraftingCosts, TargetPasses, predict
from edgespec.engine.engine import Engine
from edgespec.errors import ModelFileError, StreamError
from edgespec.files.user_folders import cache_folder
from edgespec.generation.config import GenerationConfig
from edgespec.llama.quantize import make_drafter
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.experts import switch
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory.budget import plan_memory
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.profiles import updates
from edgespec.profiles.store import ProfileStore
from tests.hanging_reads import cancelled_while_reading, fail_a_read
from tests.leaks import held_around
from tests.least_memory import load_in_least_memory, weights_of
from tests.tiers import slow_except
from tests.tiny import MIXTURES, N_EXPERT, N_EXPERT_USED, N_LAYER, write_tiny

pytestmark = pytest.mark.kernels

MIB = 1 << 20
CONFIG = GenerationConfig(max_tokens=24)
PROMPT = "the one and the other"
LONG = "one of the other things that are there for all of the time " * 9


def load_streamed(model: Path, spare: int = 0, **options: Any) -> Engine:
    return load_in_least_memory(model, spare, **{"context": 256, **options})


def resident_answer(path: Path) -> tuple[list[int], np.ndarray]:
    """The tokens and last logits of the model with all of its weights in memory."""
    with edgespec.load(path, draft="none", context=256) as engine:
        return engine.generate(PROMPT, CONFIG, raw=True).tokens, engine.target.context.logits().copy()


def assert_same_streamed(
    path: Path, resident: tuple[list[int], np.ndarray], **options: Any
) -> StreamedWeights:
    """Compare tokens and logits; returns the weights that were streamed."""
    expected, logits = resident
    with load_streamed(path, **options) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
        assert answer.tokens == expected
        assert (engine.target.context.logits() == logits).all()
        assert answer.experts is not None
        assert answer.experts.misses > 0
        return weights_of(engine)


@pytest.fixture(scope="module")
def plain(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture in F16."""
    return write_tiny(tmp_path_factory.mktemp("experts") / "plain.gguf", "qwen3moe", smol_path)


@pytest.fixture(scope="module")
def mixture(plain: Path) -> Path:
    """The mixture in Q4_0, for which most processors have a kernel layout."""
    return make_drafter(plain, plain.with_name("q4_0.gguf"), quantization="q4_0")


@pytest.mark.parametrize("architecture", slow_except(["qwen3next"], sorted(MIXTURES)))
def test_mixtures_of_every_make(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / f"{architecture}.gguf", architecture, smol_path)
    path = make_drafter(model, tmp_path / "quantized.gguf", quantization="q4_k_m")
    files = ModelFiles.of(read_header(path))
    found = layer_weights(files).experts
    assert len(found) == N_LAYER - (architecture in ("glm4moe", "deepseek2"))
    assert {layer.n_experts for layer in found} == {N_EXPERT}
    weights = assert_same_streamed(path, resident_answer(path), spare=6 * MIB)
    assert weights.packed is gains_from_packing(files.layers())


def test_experts_that_are_no_multiples_of_a_block_are_read_from_the_model_itself(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    model = write_tiny(tmp_path / "model.gguf", "gpt-oss", smol_path)
    path = make_drafter(model, tmp_path / "q4_0.gguf", quantization="q4_0")
    files = ModelFiles.of(read_header(path))
    sizes = {part.n_bytes % 4096 for part in layer_weights(files).experts[0].parts(0)}
    assert sizes != {0}
    assert not assert_same_streamed(path, resident_answer(path)).packed


def test_split_files(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some processors have a layout for F16, which the model's own files do not have.
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    first = write_tiny(tmp_path / "parts.gguf", "qwen3moe", smol_path, split=25)
    assert len(ModelFiles.of(read_header(first)).paths) > 2
    assert_same_streamed(first, resident_answer(first), pack="never")


def test_trees_pads_and_long_prompts_change_nothing_in_exact_decoding(mixture: Path) -> None:
    config = CONFIG.with_(temperature=0.7, seed=3)
    with edgespec.load(mixture, draft="none", exact=True, context=256) as engine:
        expected = engine.generate(LONG, config, raw=True).tokens
    for spare, budget in ((0, 6), (2 * MIB, 24)):
        with load_streamed(mixture, spare, draft=mixture, tree_budget=budget, exact=True) as engine:
            answer = engine.generate(LONG, config, raw=True)
            assert answer.tokens == expected
            assert answer.exact
            assert max(record.nodes for record in answer.passes) > 2


def test_padding_needs_no_experts_of_its_own(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # EdgeSpec's own need no padding
    with load_streamed(mixture, MIB, exact=True) as engine:
        assert engine.target.rule is not None
        assert engine.target.rule.padded(1) > 1
        answer = engine.generate(PROMPT, CONFIG, raw=True)
    assert answer.experts is not None
    needed = answer.experts.hits + answer.experts.misses
    assert needed == len(answer.passes) * N_LAYER * N_EXPERT_USED


def test_many_texts_in_a_pass(mixture: Path) -> None:
    prompts = [PROMPT, "all of the", "there is one", "and so it was that"]
    with load_streamed(mixture, exact=True) as engine:
        alone = [engine.generate(prompt, CONFIG, raw=True).tokens for prompt in prompts]
        together = engine.generate_many(prompts, CONFIG, raw=True)
    assert [answer.tokens for answer in together] == alone


def test_more_memory_holds_more_experts_and_the_budget_counts_them(plain: Path) -> None:
    rates, read = [], []
    for spare in (0, 3 * MIB, 64 * MIB):
        with load_streamed(plain, spare) as engine:
            answer = engine.generate(PROMPT, CONFIG, raw=True)
            assert answer.experts is not None
            rates.append(answer.experts.hit_rate)
            read.append(answer.to_json(PROMPT)["experts"]["read_bytes_per_token"])
            weights = weights_of(engine)
            assert weights.expert_use is not None
            assert weights.resident_bytes < answer.memory.budget_bytes
            assert answer.memory.streamed_bytes_per_pass == weights.streamed_bytes
    # In between, it depends on the text: what was used least may be needed next.
    assert rates[-1] > max(rates[:-1])
    assert read[-1] < min(read[:-1])


def test_a_plan_knows_how_many_experts_fit_and_says_what_it_assumes(plain: Path) -> None:
    files = ModelFiles.of(read_header(plain))
    needs, config = MemoryNeeds([footprint(files, n_cells=256, n_outputs=8)], 180 * MIB), Config()
    whole = needs.total
    plans = [plan_memory(needs, files, whole - short * MIB, config).holding for short in (12, 6, 0)]
    few, more, all_fit = (plan.experts for plan in plans)
    assert few is not None
    assert more is not None
    assert all_fit is None
    assert N_EXPERT <= few.n_slots < more.n_slots < few.n_experts == N_EXPERT * N_LAYER
    assert few.n_needed == N_EXPERT_USED * N_LAYER
    assert not few.measured
    assert few.hit_rate < more.hit_rate < 1
    assert plans[0].streamed_bytes > plans[1].streamed_bytes > plans[2].streamed_bytes == 0
    hits = HitRates.measured_at(few.held, 0.9)
    measured = plan_memory(needs, files, whole - 12 * MIB, config, hits=hits).holding
    assert measured.experts is not None
    assert measured.experts.measured
    assert measured.experts.hit_rate == pytest.approx(0.9)
    passes = TargetPasses(Curve.through([(1, 0.01), (8, 0.02)]), read_rate=100 * MIB, overlap=1.0)
    one, eight = (predict(plans[0], passes, DraftingCosts("none"), nodes) for nodes in (1, 8))
    assert one.pass_s == pytest.approx(0.01 + plans[0].streamed_bytes / (100 * MIB))
    assert eight.read_s > 2 * one.read_s
    assert one.to_json()["experts"]["hit_rate_measured"] is False


def test_runs_measure_how_often_experts_are_in_memory(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_ENOUGH_EXPERTS", 100)
    with load_streamed(mixture, MIB) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
        held = weights_of(engine).experts_held
    known = ProfileStore().experts(read_header(mixture).fingerprint)
    assert known is not None
    assert answer.experts is not None
    assert (known.held, known.hit_rate) == (held, answer.experts.hit_rate)


def test_drafting_where_every_row_costs_experts_begins_small(mixture: Path) -> None:
    with load_streamed(mixture, draft=mixture) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
    sizes = [record.nodes for record in answer.passes]
    assert next(nodes for nodes in sizes if nodes > 1) == 2
    assert max(sizes) <= 8


def test_whole_layers_where_they_are_asked_for_or_the_choice_cannot_be_seen(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_streamed(mixture, experts="never", exact=False) as engine:
        answer = engine.generate(PROMPT, CONFIG, raw=True)
        assert answer.experts is None
        assert answer.to_json(PROMPT)["experts"] is None
    monkeypatch.setattr(switch, "CHOICE", b"ffn_moe_elsewhere-")
    with load_streamed(mixture, 32 * MIB, exact=False) as engine:
        assert "Unknown expert routing: streaming whole layers instead of single experts." in engine.notes
        assert weights_of(engine).expert_use is None
        assert engine.generate(PROMPT, CONFIG, raw=True).tokens == answer.tokens


@pytest.fixture
def streamed(mixture: Path) -> Iterator[Engine]:
    with load_streamed(mixture) as engine:
        yield engine


def expected_of(engine: Engine) -> list[int]:
    tokens = engine.generate(PROMPT, CONFIG, raw=True).tokens
    engine.target.rewind(0)
    return tokens


def test_a_failed_read_loses_only_its_answer(streamed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of(streamed)
    fail_a_read(monkeypatch, 30)
    with pytest.raises(StreamError, match="Input/output error"):
        streamed.generate(PROMPT, CONFIG, raw=True)
    assert streamed.generate(PROMPT, CONFIG, raw=True).tokens == expected


def test_an_interrupt_in_the_callback_is_not_lost(streamed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of(streamed)
    bring, countdown = switch.ExpertSwitch._bring, [20]

    def failing(self: switch.ExpertSwitch, layer: int, node: int) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        bring(self, layer, node)

    monkeypatch.setattr(switch.ExpertSwitch, "_bring", failing)
    with pytest.raises(KeyboardInterrupt):
        streamed.generate(PROMPT, CONFIG, raw=True)
    assert streamed.generate(PROMPT, CONFIG, raw=True).tokens == expected


def test_cancelling_takes_effect_while_waiting_for_an_expert(
    streamed: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(streamed)
    answer = cancelled_while_reading(
        streamed, monkeypatch, lambda: streamed.generate(PROMPT, CONFIG, raw=True), reads=40
    )
    assert answer.finish_reason == "cancelled"
    assert answer.tokens == expected[: len(answer.tokens)]
    assert streamed.generate(PROMPT, CONFIG, raw=True).tokens == expected


def read_everything(model: Path) -> None:
    """A text so long that its tokens need every expert."""
    with load_streamed(model, pack="always") as engine:
        engine.generate(LONG, CONFIG, raw=True)


def test_a_damaged_record_is_noticed_before_use_and_the_pack_made_anew(mixture: Path) -> None:
    with load_streamed(mixture, pack="always") as engine:
        expected = expected_of(engine)
    folder = cache_folder() / "packs"
    (path,) = folder.glob("*.experts*.pack")
    good = path.read_bytes()
    weights = layer_weights(ModelFiles.of(read_header(mixture)))
    # The last layer's records are the last thing before the index, and the first pass needs two of four.
    end = len(good) - weights.experts[-1].n_bytes // 2
    broken = bytearray(good)
    for at in range(end - weights.experts[-1].n_bytes // 3, end, 4096):
        broken[at] ^= 1
    path.write_bytes(broken)
    with pytest.raises(StreamError) as caught:
        read_everything(mixture)
    assert caught.value.what == f"The packed layer file '{path}' is damaged, and was removed."
    with load_streamed(mixture, pack="always") as engine:
        assert expected_of(engine) == expected
    assert path.read_bytes() == good


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be cut there")
def test_a_file_cut_while_in_use_ends_the_answer_and_not_the_process(plain: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(plain, model)
    with load_streamed(model, pack="never") as engine:
        chunks = engine.stream(PROMPT, CONFIG, raw=True)
        next(chunks)
        os.truncate(model, model.stat().st_size // 2)
        with pytest.raises((StreamError, ModelFileError), match="was changed while the model was in use"):
            list(chunks)


@pytest.mark.slow
def test_opening_and_closing_leaks_nothing(mixture: Path) -> None:
    before, after = held_around(mixture, context=64)
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
