"""Weights that come and go: the same text as from memory, and every fault survived."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import StreamError
from edgespec.files.user_folders import cache_folder
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.kernels import ggml
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layer_ring import LayerSwitch
from edgespec.offload.packing import choice
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.offload.paging import PagedWeights
from edgespec.planning.devices import machine
from tests.hanging_reads import cancelled_while_reading, fail_a_read
from tests.leaks import held_around
from tests.least_memory import load_in_least_memory, weights_of

PROMPT = "Write a short story about a fox and a crow who share a house."
GREEDY = GenerationConfig(max_tokens=24)
CONTEXT = 256
MIB = 1 << 20


def load_streamed(model: Path, spare: int = 0, **options: Any) -> Engine:
    """The model in the least memory, and `spare` bytes more."""
    return load_in_least_memory(model, spare, **{"context": CONTEXT, **options})


def generate(engine: Engine, config: GenerationConfig = GREEDY) -> Generation:
    engine.target.rewind(0)
    answer = engine.generate(PROMPT, config)
    assert len(answer.tokens) > 20  # or equal answers would mean little
    return answer


def bytes_of_layers(model: Path) -> int:
    return sum(layer.n_bytes for layer in ModelFiles.of(read_header(model)).layers())


def packs() -> list[Path]:
    return [path for path in (cache_folder() / "packs").glob("*") if path.suffix != ".lock"]


@pytest.fixture(scope="module")
def resident(q4_drafter_path: Path) -> Iterator[Engine]:
    """A model whose weights have a kernel layout, all of it in memory."""
    with edgespec.load(q4_drafter_path, draft="none", exact=True, context=CONTEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def streamed(q4_drafter_path: Path) -> Iterator[Engine]:
    """The model streamed through a ring of two slots, drafted from its own text.

    Earlier answers are not drafted: the tests count reads of an answer that was given before.
    """
    with load_streamed(q4_drafter_path, draft="lookup", reuse_answers=False) as engine:
        yield engine


@pytest.mark.kernels
@pytest.mark.parametrize("config", [GREEDY, GREEDY.with_(temperature=1.0, seed=5)])
def test_streamed_text_is_the_resident_text(
    q4_drafter_path: Path, streamed: Engine, resident: Engine, config: GenerationConfig
) -> None:
    expected = generate(resident, config)
    answer = generate(streamed, config)
    assert answer.tokens == expected.tokens
    assert answer.exact
    layers = bytes_of_layers(q4_drafter_path)
    assert answer.memory.streamed_bytes_per_pass > layers / 2
    assert answer.memory.resident_bytes < streamed.target.model.n_bytes
    assert answer.memory.peak_rss_bytes > 0
    assert answer.timings.io_wait_s == pytest.approx(sum(record.wait_s for record in answer.passes))
    assert weights_of(streamed).waited_s > 0


@pytest.mark.slow
@pytest.mark.kernels
def test_trees_of_a_model_drafter_change_nothing(
    q4_drafter_path: Path, dropped_drafter_path: Path, resident: Engine
) -> None:
    config = GREEDY.with_(temperature=0.7, seed=3)
    expected = generate(resident, config)
    # Enough for some layers to stay, so that runs of both kinds alternate.
    with load_streamed(
        q4_drafter_path, 20 * MIB, draft=dropped_drafter_path, tree_budget=16, exact=True
    ) as engine:
        answer = generate(engine, config)
        streamed = weights_of(engine).streamed_bytes
    assert answer.tokens == expected.tokens
    assert max(record.nodes for record in answer.passes) > 4
    assert 0 < streamed < bytes_of_layers(q4_drafter_path) - 10 * MIB


def test_the_drafter_is_loaded_while_layers_are_read(
    q4_drafter_path: Path, dropped_drafter_path: Path, resident: Engine
) -> None:
    seen: list[tuple[str, float]] = []
    with load_streamed(
        q4_drafter_path,
        20 * MIB,
        draft=dropped_drafter_path,
        exact=True,
        on_progress=lambda what, fraction: seen.append((what, fraction)),
    ) as engine:
        assert generate(engine).tokens == generate(resident).tokens
    target, drafter = (f"Loading {path.name}" for path in (q4_drafter_path, dropped_drafter_path))
    assert seen.index((target, 0.0)) < seen.index((drafter, 0.0)) < seen.index((target, 1.0))


@pytest.mark.slow
@pytest.mark.kernels
def test_mixed_quantizations_and_sliding_windows(gemma_path: Path) -> None:
    with edgespec.load(gemma_path, draft="none", exact=True, context=CONTEXT) as engine:
        expected = generate(engine)
    with load_streamed(gemma_path, draft="lookup", tree_budget=8, pack="always") as engine:
        answer = generate(engine)
    assert answer.tokens == expected.tokens
    assert len(packs()) == 1


@pytest.mark.slow
def test_weights_without_a_kernel_layout_come_from_the_model_itself(
    smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # other processors have one for these weights
    with edgespec.load(smol_path, draft="none", exact=True, context=CONTEXT) as engine:
        expected = generate(engine)
    with load_streamed(smol_path, 9 * MIB) as engine:
        assert generate(engine).tokens == expected.tokens
        assert any(note.endswith("MiB per pass.") for note in engine.notes)
    assert packs() == []


def test_auto_streams_what_does_not_fit_and_pages_where_it_cannot(
    q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"draft": "none", "context": CONTEXT, "exact": False, "pack": "never"}
    layers = bytes_of_layers(q4_drafter_path)
    with load_streamed(q4_drafter_path, **options) as engine:
        budget = engine.generate("Hi", GenerationConfig(max_tokens=1)).memory.budget_bytes
        expected = generate(engine).tokens
    with edgespec.load(q4_drafter_path, memory=budget, **options) as engine:
        assert weights_of(engine).streamed_bytes > layers / 2
        assert generate(engine).tokens == expected
    assert packs() == []

    def refuse() -> None:
        raise ggml.UnsupportedBuild("a tensor's name is elsewhere")

    monkeypatch.setattr(machine, "check_supported", refuse)
    with edgespec.load(q4_drafter_path, memory=budget, **options) as engine:
        paged = engine.target.model.weights
        assert isinstance(paged, PagedWeights)
        assert "Weights cannot be streamed here: a tensor's name is elsewhere." in engine.notes
        answer = generate(engine)
        assert len(answer.tokens) == len(expected)
        assert paged.read_bytes > layers / 2 * len(answer.passes)  # every layer, ahead of every pass
    with pytest.raises(edgespec.errors.BackendError, match="offload='mmap'"):
        edgespec.load(q4_drafter_path, memory=budget, offload="stream", **options)


@pytest.mark.slow
@pytest.mark.kernels
def test_a_damaged_pack_is_noticed_before_use_and_made_anew(
    q4_drafter_path: Path, dropped_drafter_path: Path, resident: Engine
) -> None:
    options: dict[str, Any] = {"exact": False, "pack": "always"}
    load_streamed(q4_drafter_path, **options).close()
    (path,) = packs()
    good = path.read_bytes()

    def damage(at: int) -> None:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])

    damage(len(good) - 10)  # the index: seen when it is opened
    with load_streamed(q4_drafter_path, **options) as engine:
        assert path.read_bytes() == good
        expected = generate(engine).tokens
    damage(len(good) // 2)  # a streamed layer: seen when it is first read
    with load_streamed(q4_drafter_path, **options) as engine:
        with pytest.raises(StreamError) as caught:
            generate(engine)
        assert caught.value.what == f"The packed layer file '{path}' is damaged, and was removed."
    assert packs() == []
    with load_streamed(q4_drafter_path, **options) as engine:
        assert generate(engine).tokens == expected
    # A layer that stays in memory: seen while loading, and made anew at once.
    damage(len(good) - 200_000)
    options |= {"draft": dropped_drafter_path, "exact": True}
    with load_streamed(q4_drafter_path, 20 * MIB, **options) as engine:
        assert path.read_bytes() == good
        assert generate(engine).tokens == generate(resident).tokens


def test_a_full_disk_means_streaming_the_model_itself(
    q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gains_from_packing(ModelFiles.of(read_header(q4_drafter_path)).layers()):
        pytest.skip("this processor has no faster layout for these weights, so nothing would be packed")
    monkeypatch.setattr(choice, "_SPARE_DISK", 1 << 60)
    with load_streamed(q4_drafter_path, exact=False) as engine:
        assert any(note.startswith("The packed layer file would take") for note in engine.notes)
        assert len(generate(engine).tokens) == GREEDY.max_tokens
    assert packs() == []


def test_a_file_cut_while_in_use_ends_the_answer_and_not_the_process(smol_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(smol_path, model)
    with load_streamed(model, exact=False, pack="never") as engine:
        chunks = engine.stream(PROMPT, GREEDY)
        shown = [next(chunks).text for _ in range(3)]
        os.truncate(model, model.stat().st_size // 2)
        with pytest.raises(StreamError) as caught:
            shown += [chunk.text for chunk in chunks]
        assert caught.value.what == f"'{model}' was changed while the model was in use."
        assert engine.last_generation is not None
        assert engine.last_generation.finish_reason == "error"
        assert len(engine.last_generation.tokens) >= 3
        assert engine.last_generation.text.startswith("".join(shown[:3]))
        with pytest.raises(StreamError):
            engine.generate(PROMPT, GREEDY)


def test_a_failed_read_loses_only_its_answer(
    streamed: Engine, resident: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(resident).tokens
    fail_a_read(monkeypatch, 70)
    streamed.target.rewind(0)
    with pytest.raises(StreamError, match=r"Reading failed: Input/output error\."):
        streamed.generate(PROMPT, GREEDY)
    # The cache still holds what was read before, and continues from there.
    assert streamed.generate(PROMPT, GREEDY).tokens == expected


def test_an_exception_in_the_callback_is_not_lost(
    streamed: Engine, resident: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(resident).tokens
    stopped, countdown = LayerSwitch.computed, [70]

    def failing(self: LayerSwitch, node: int) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        stopped(self, node)

    monkeypatch.setattr(LayerSwitch, "computed", failing)
    streamed.target.rewind(0)
    with pytest.raises(KeyboardInterrupt):
        streamed.generate(PROMPT, GREEDY)
    assert streamed.generate(PROMPT, GREEDY).tokens == expected


def test_cancelling_takes_effect_while_waiting_for_the_disk(
    streamed: Engine, resident: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(resident).tokens
    streamed.target.rewind(0)
    answer = cancelled_while_reading(
        streamed, monkeypatch, lambda: streamed.generate(PROMPT, GREEDY), reads=100
    )
    assert answer.finish_reason == "cancelled"
    assert answer.tokens
    assert answer.tokens == expected[: len(answer.tokens)]
    assert generate(streamed).tokens == expected


@pytest.mark.kernels
def test_two_engines_share_one_pack(q4_drafter_path: Path, resident: Engine) -> None:
    expected = generate(resident).tokens
    options: dict[str, Any] = {"exact": True, "pack": "always"}
    with load_streamed(q4_drafter_path, **options) as one:
        (path,) = packs()
        made = path.stat().st_mtime_ns
        with load_streamed(q4_drafter_path, **options) as other:
            assert generate(one).tokens == generate(other).tokens == expected
        assert path.stat().st_mtime_ns == made


@pytest.mark.slow
def test_of_two_processes_that_start_together_one_packs(q4_drafter_path: Path) -> None:
    program = f"""
import edgespec
seen = set()
with edgespec.load({str(q4_drafter_path)!r}, draft="none", context=64, offload="stream", exact=False,
                   memory=600 << 20, pack="always",
                   on_progress=lambda what, _: seen.add(what.split()[0])) as engine:
    print(engine.generate("Hi", edgespec.GenerationConfig(max_tokens=8), raw=True).tokens, "Packing" in seen)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [child.communicate()[0].rsplit(maxsplit=1) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert said[0][0] == said[1][0]
    assert sorted(packed for _, packed in said) == ["False", "True"]
    assert len(packs()) == 1


@pytest.mark.slow
def test_opening_and_closing_leaks_nothing(short_path: Path) -> None:
    before, after = held_around(short_path, exact=False, context=64)
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
    assert after.resident - before.resident < 15 * MIB
