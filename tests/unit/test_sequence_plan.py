"""Number of sequences that a cache is planned for: by memory, by what passes take, and by request."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.batch.input_file import summarize_input
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.loading.load import load
from edgespec.machine.memory import FreeMemory
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import cell_bytes, cells_for
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices import assignment
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.plan import SequencePlan
from edgespec.planning.planner import Planner
from edgespec.planning.sequences import plan_sequences
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import PassProfile, ProfileStore, machine_identity

FLAT = Curve((1, 60), (0.1, 0.1))
STEEP = Curve((1, 4, 60), (0.1, 0.1, 1.5))  # from four rows on, each takes as long as every other
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(smol_path: Path) -> ModelFiles:
    return ModelFiles.of(read_header(smol_path))


def planned(
    model: ModelFiles,
    parallel: int | str | None,
    curve: Curve | None = None,
    rate: float = 0.0,
    cards: Cards | None = None,
    **more: Any,
) -> SequencePlan:
    """The plan, where passes were measured to take so long."""
    options = {"draft": "none", "context": 512, "gpu_layers": 0, "parallel": parallel} | more
    machine = MachineSnapshot(FreeMemory(64 << 30), 1, cards)
    store = ProfileStore()
    if curve is not None:
        fingerprint = model.headers[0].fingerprint
        threads = str(known_threads(fingerprint, store))
        key = machine_identity() | {"threads": threads, "model": fingerprint, "mode": "test"}
        store.put(key, PassProfile(curve, streamed=rate > 0, read_rate=rate))
    return plan_sequences(Planner(model, Config.of(**options), machine, store), None)


def test_a_single_text_is_planned_for_where_nobody_asks(model: ModelFiles) -> None:
    assert planned(model, None, FLAT) == SequencePlan(None, 0)
    assert planned(model, 1, FLAT) == SequencePlan(1, 0)


def test_in_memory_the_passes_decide(model: ModelFiles) -> None:
    assert planned(model, "auto") == SequencePlan(16, 15 * 512), "nothing was measured"
    assert planned(model, "auto", STEEP) == SequencePlan(4, 3 * 512)
    assert planned(model, "auto", FLAT) == SequencePlan(60, 59 * 512)
    assert planned(model, 10, STEEP) == SequencePlan(10, 9 * 512), "what is asked for is done"
    plan = planned(model, 10, STEEP, text_tokens=100)
    assert plan == SequencePlan(10, 9 * 100)
    assert "22.5 KiB of cache" in plan.note
    assert "10 texts of 100 tokens" in plan.note
    assert planned(model, 2, text_tokens=9999).more_cells == 512, "a text is no longer than the context"


def test_company_never_pushes_a_model_out_of_memory(model: ModelFiles) -> None:
    alone = model.tensor_bytes + 400 * MIB
    plan = planned(model, "auto", FLAT, memory=alone)
    assert 1 < (plan.sequences or 0) < 60
    assert planned(model, 60, FLAT, memory=alone).more_cells < 59 * 512
    assert planned(model, 60, FLAT, memory=alone).sequences == 60, "texts wait for one another"


def test_a_streamed_model_gives_memory_for_texts_that_gain_more(model: ModelFiles) -> None:
    # What a single text needs depends on the kernel layouts of the processor.
    stream: dict[str, Any] = {"offload": "stream"}
    sizes = range(200 * MIB, 600 * MIB, 10 * MIB)
    least = next(m for m in sizes if planned(model, "auto", FLAT, rate=1e9, memory=m, **stream).sequences)
    small = {"memory": least + 30 * MIB} | stream
    plan = planned(model, "auto", FLAT, rate=1e9, **small)
    assert plan.sequences is not None
    assert plan.sequences > 1
    slow_disk = planned(model, "auto", STEEP, rate=1e12, **small)
    assert (slow_disk.sequences or 0) <= 4, "the processor is the bottleneck"
    unmeasured = planned(model, 60, **small)
    cells = cell_bytes(model.headers[0]) * unmeasured.more_cells
    assert cells <= small["memory"] / 8
    assert unmeasured.sequences == 60


def test_texts_have_cells_on_a_card_too(model: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processor's speed is the profile's alone: measured kernels may be faster than this card.
    monkeypatch.setattr(assignment, "measured_products", lambda type_id: None)
    seconds = (1e-10, 2e-10, 4e-10)
    transfer = Curve.through([(1 << 14, 1e-5), (1 << 24, 2e-3)])
    profile = DeviceProfile(tuple(s / 10 for s in seconds), seconds, transfer)
    alone = model.tensor_bytes + 400 * MIB
    more = {"memory": alone, "gpu_layers": "auto", "draft_device": "none"}
    for free, all_of_them in ((4 << 30, True), (64 * MIB, False)):
        cards = Cards.of([Card("CUDA0", "a card", free, free, False, profile)], usual_type(model))
        assert (planned(model, 60, FLAT, cards=cards, **more).more_cells == 59 * 512) == all_of_them


def test_too_little_memory_is_left_to_loading(model: ModelFiles) -> None:
    assert planned(model, "auto", FLAT, memory=10 * MIB) == SequencePlan(None, 0)


@pytest.mark.parametrize("key", ["ssm.state_size", "wkv.head_size", "shortconv.l_cache"])
def test_models_whose_cache_has_one_size_keep_it(model: ModelFiles, key: str) -> None:
    header = model.headers[0]
    metadata = dict(header.metadata) | {f"{header.architecture}.{key}": 16}
    recurrent = ModelFiles.of(replace(header, metadata=metadata))
    assert planned(recurrent, "auto", FLAT) == SequencePlan(None, 0)


@pytest.mark.parametrize("parallel", [0, 1001, "many"])
def test_numbers_that_cannot_be_meant(parallel: int | str) -> None:
    with pytest.raises(UsageError, match=r"^parallel must be"):
        load(parallel=parallel)


def test_a_loaded_engine_has_the_cells_and_the_same_text(short_path: Path) -> None:
    with load(short_path, draft="none", exact=True, context=128) as engine:
        expected = engine.generate("Count to ten.", GenerationConfig(max_tokens=8), raw=True).tokens
        assert engine.target.context.n_cells >= cells_for(128)
        before = engine.target.context.n_cells
        identity = engine.target.identity
    with load(short_path, draft="none", exact=True, context=128, parallel=9) as engine:
        assert engine.texts == 9
        assert engine.target.context.n_cells >= before + 8 * 128
        assert engine.context == 128, "a text is as long as before"
        assert engine.target.identity == identity, "and its states on disk are the same"
        (answer,) = engine.generate_many(["Count to ten."], GenerationConfig(max_tokens=8), raw=True)
        assert answer.tokens == expected


def test_the_tokens_of_a_line_are_estimated_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes((b"{" * 349 + b"\n") * 5 + b"\n")
    assert summarize_input(str(path)).usual_tokens(64) == 100 + 32 + 64
    path.write_bytes((b"{" * 349 + b"\n") * 3000 + (b"x" * 3499 + b"\n") * 3000)
    assert summarize_input(str(path)).usual_tokens(64) == 100 + 32 + 64
    path.write_bytes(b"")
    assert summarize_input(str(path)).usual_tokens(64) == 32 + 64
    assert summarize_input("-").usual_tokens(64) is None


def test_an_input_is_read_once_before_its_lines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "in.jsonl", []
    path.write_bytes(b'{"prompt": "a"}\n\n \t\n{"prompt": "b", "images": ["c.png"]}')
    opened = io.FileIO
    monkeypatch.setattr(io, "FileIO", lambda *args: reads.append(args) or opened(*args))
    summary = summarize_input(str(path))
    assert (summary.lines, summary.has_images, len(reads)) == (2, True, 1)
