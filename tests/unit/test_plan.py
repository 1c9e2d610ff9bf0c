"""The plan of a load on simulated machines: what is predicted, what is done, and what both rest on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.loading.load import load
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import BLOCK_SIZES, ArrayInfo, GGUFHeader, TensorInfo
from edgespec.planning.decision import Decision
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.memory.budget import least_budget
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Planner
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import ProfileStore
from tests.tiers import examples

MIB = 1 << 20
SECONDS = (1e-10, 2e-10, 4e-10)
F32, Q4_0, Q8_0, Q4_K, Q6_K = 0, 2, 8, 12, 14


def model(
    layers: int,
    width: int,
    type_id: int,
    *,
    tied: bool = False,
    experts: int = 0,
    vocabulary: int = 2048,
    name: str = "m",
) -> ModelFiles:
    """A llama, or a mixture with so many experts, as its header describes it."""
    wide = 4 * width
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"token_embd.weight": ((width, vocabulary), type_id)}
    if not tied:
        shapes["output.weight"] = ((width, vocabulary), type_id)
    for layer in range(layers):
        block = f"blk.{layer}"
        shapes[f"{block}.attn_norm.weight"] = (width,), F32
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"{block}.{matrix}.weight"] = (width, width), type_id
        if experts:
            shapes[f"{block}.ffn_gate_inp.weight"] = (width, experts), F32
        for matrix, size in (("gate", (width, wide)), ("up", (width, wide)), ("down", (wide, width))):
            if experts:
                shapes[f"{block}.ffn_{matrix}_exps.weight"] = (*size, experts), type_id
            else:
                shapes[f"{block}.ffn_{matrix}.weight"] = size, type_id
    tensors, at = [], 4096
    for tensor, (shape, kind) in shapes.items():
        elements = 1
        for length in shape:
            elements *= length
        n_bytes = elements * BLOCK_SIZES[kind][1] // BLOCK_SIZES[kind][0]
        tensors.append(TensorInfo(tensor, shape, kind, at, n_bytes))
        at += -(-n_bytes // 32) * 32
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.embedding_length": width,
        "llama.feed_forward_length": wide,
        "llama.attention.head_count": width // 64,
        "llama.context_length": 8192,
        "tokenizer.ggml.tokens": ArrayInfo("string", vocabulary),
    }
    if experts:
        metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    path = Path(f"/nowhere/{name}.gguf")
    return ModelFiles((GGUFHeader(path, 3, metadata, tuple(tensors), 32, 4096, at, name),))


@st.composite
def models(draw: st.DrawFn) -> ModelFiles:
    return model(
        draw(st.integers(1, 10)),
        draw(st.sampled_from([256, 512, 1024])),
        draw(st.sampled_from([Q4_0, Q8_0, Q4_K, Q6_K])),
        tied=draw(st.booleans()),
        experts=draw(st.sampled_from([0, 0, 4, 8])),
        vocabulary=draw(st.sampled_from([512, 4096, 32_000])),
    )


@st.composite
def devices(draw: st.DrawFn, *, remote: bool) -> Cards:
    """Cards, or other machines."""

    def device(number: int) -> Card:
        slowness = draw(st.floats(0.02, 4.0))
        transfer = Curve.through([(1 << 14, draw(st.floats(1e-6, 1e-2))), (1 << 24, 2e-2)])
        profile = DeviceProfile(tuple(slowness * s for s in SECONDS), SECONDS, transfer)
        free = draw(st.integers(0, 40)) * 10 * MIB
        return Card(f"DEVICE{number}", "", free, free, draw(st.booleans()) and not remote, profile)

    found = tuple(device(number) for number in range(draw(st.integers(1, 2))))
    return Cards(found, SECONDS, Q4_0, remote=remote)


@dataclass(frozen=True)
class Case:
    """A simulated machine, with what is to be loaded and how."""

    target: ModelFiles
    drafter: ModelFiles | None
    config: Config
    machine: MachineSnapshot

    @property
    def planner(self) -> Planner:
        return Planner(self.target, self.config, self.machine, ProfileStore(Path("/nowhere/profiles")))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(models())
    drafters = st.builds(
        model, st.integers(1, 3), st.just(256), st.just(Q4_0), tied=st.booleans(), name=st.just("d")
    )
    drafter = draw(st.none() | drafters)
    held = draw(st.sampled_from(["processor", "cards", "workers"]))
    there = None if held == "processor" else draw(devices(remote=held == "workers"))
    offloads = ["auto", "none"] if held == "workers" else ["auto", "auto", "stream", "none", "mmap"]
    options = {
        "context": draw(st.sampled_from([64, 512, 4096])),
        "offload": draw(st.sampled_from(offloads)),
        "experts": draw(st.sampled_from(["auto", "auto", "never"])),
        "pack": draw(st.sampled_from(["auto", "never"])),
        "slots": draw(st.none() | st.integers(2, 5)),
        "exact": draw(st.sampled_from([None, True, False])),
        "tree_budget": draw(st.none() | st.integers(1, 200)),
        "kv": draw(st.sampled_from(["f16", "q8_0"])),
    }
    if held == "cards":
        options["gpu_layers"] = draw(st.sampled_from(["auto", "all", 0, 1, 3]))
        options["draft_device"] = draw(st.sampled_from(["auto", "none"]))
    if held == "workers":
        options["workers"] = ("127.0.0.1:1",)
    usual = 160 * MIB + target.tensor_bytes + (0 if drafter is None else 40 * MIB)
    machine = MachineSnapshot(
        FreeMemory(int(usual * draw(st.floats(0.5, 2)))),
        draw(st.integers(1, 8)),
        there if held == "cards" else None,
        there if held == "workers" else None,
        own_kernels=draw(st.booleans()),
    )
    return Case(target, drafter, Config.of(**options), machine)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the processor's speed from the simulated devices alone."""
    monkeypatch.setattr("edgespec.planning.devices.assignment.measured_products", lambda type_id: None)


def planned(case: Case) -> Plan | None:
    """The plan; None if the memory is too small."""
    try:
        return case.planner.plan(case.drafter)
    except MemoryLimitError:
        return None
    except BackendError:  # no layer is left to stream
        return None


@settings(max_examples=examples(500), deadline=None)
@given(cases())
def test_a_plan_fits_its_budget_and_keeps_to_what_was_asked_for(case: Case) -> None:
    plan = planned(case)
    if plan is None:
        return
    memory, config = plan.memory, case.config
    left = plan.on_cards.left(plan.needs) if plan.assignment is None else plan.assignment.left(plan.needs)
    assert memory.budget == case.planner.budget
    if memory.layout is not None:
        assert memory.layout.placement.n_bytes <= memory.budget
        assert config.memory.offload in ("auto", "stream")
        assert memory.layout.packed <= (config.memory.pack != "never")
        assert bool(memory.layout.weights.experts) <= (config.memory.experts != "never")
        if config.memory.slots and memory.layout.placement.streamed:
            assert memory.layout.placement.n_slots <= config.memory.slots
    elif not memory.paged and not case.machine.cards:
        assert left.total <= memory.budget
    if config.memory.offload == "none":
        assert memory.in_memory
    assert plan.streams == (plan.holding.streamed_bytes > 0)
    if plan.assignment is not None and case.machine.cards is not None:
        for card, count in plan.assignment.used(case.machine.cards.devices):
            assert count
            assert card.free > 0


@settings(max_examples=examples(500), deadline=None)
@given(cases())
def test_a_drafter_leaves_a_share_of_the_reads_in_any_plan(case: Case) -> None:
    if (plan := planned(case)) is not None:
        share = Decision(case.planner, plan).read_share_alone
        assert 0 <= share <= 1
        assert (share < 1) == (plan.streams and plan.drafter is not None and plan.holding.experts is None)


@settings(deadline=None)
@given(cases())
def test_plans_are_functions_of_what_they_are_made_from(case: Case) -> None:
    assert planned(case) == planned(case)


@given(models(), st.integers(0, 3))
def test_the_least_budget_is_the_smallest_one_with_a_plan(files: ModelFiles, doubled: int) -> None:
    machine = MachineSnapshot(FreeMemory(64 << 30), 1)
    planner = Planner(files, Config.of(context=64), machine, ProfileStore(Path("/nowhere/profiles")))
    needs = planner.sizes().at(USUAL_NODES << doubled)
    least = least_budget(needs, files, planner.config)
    assert planner.place(needs, budget=least).holding.budget == least
    with pytest.raises(MemoryLimitError):
        planner.place(needs, budget=least - 1)


@pytest.fixture
def rearranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with kernels for rearranged weights, and a disk that was measured."""
    found = (1e-10, 1e-10, 1e-10), (3e-10, 3e-10, 3e-10)
    planning = "edgespec.planning"
    monkeypatch.setattr(f"{planning}.host_products.measured_products", lambda _type: found)
    monkeypatch.setattr(f"{planning}.host_products.can_be_set", lambda: True)
    monkeypatch.setattr(f"{planning}.planner.known_read_rate", lambda *_: 3e9)
    monkeypatch.setattr(f"{planning}.planner.read_rate", lambda *_: 3e9)


@pytest.mark.usefixtures("rearranges")
@pytest.mark.parametrize(
    ("layers", "type_id", "offload", "context", "free", "memory"),
    [
        (24, Q4_0, "auto", 1024, 210_499_280, 1_483_495_515),
        (24, Q8_0, "none", 8192, 1_630_294_842, 2_610_162_440),
        (16, Q8_0, "none", 4096, 718_820_331, 1_630_504_995),
    ],
)
def test_beside_a_card_passes_are_shorter_rather_than_streamed(
    layers: int, type_id: int, offload: str, context: int, free: int, memory: int
) -> None:
    target = model(layers, 2048, type_id, vocabulary=32_000)
    slow = 1e-10, 8e-10, 32e-10
    link = Curve.through([(1 << 14, 1e-6), (1 << 24, 7e-4)])
    card = Card("DEVICE0", "", free, free, False, DeviceProfile((1e-13, 2e-13, 4e-13), slow, link))
    machine = MachineSnapshot(FreeMemory(memory), 4, Cards((card,), slow, Q4_0))
    config = Config.of(context=context, draft="none", offload=offload)
    found = Planner(target, config, machine, ProfileStore(Path("/nowhere/profiles"))).plan()
    assert found.memory.in_memory
    assert found.on_cards.left(found.needs).total <= found.memory.budget


@pytest.mark.usefixtures("rearranges")
def test_from_some_memory_on_there_is_always_room_to_read_weights_again() -> None:
    target = model(24, 2048, Q4_0, vocabulary=32_000)
    slow = 3e-10, 3e-10, 1e-8
    link = Curve.through([(1 << 14, 1e-6), (1 << 24, 8e-3)])
    free = target.tensor_bytes // 3
    card = Card("DEVICE0", "", free, free, False, DeviceProfile((1e-13, 2e-13, 4e-13), slow, link))
    tight = []
    for mebibytes in range(1800, 2400, 20):
        machine = MachineSnapshot(FreeMemory(mebibytes * MIB), 4, Cards((card,), slow, Q4_0))
        config = Config.of(context=4096, draft="none")
        found = Planner(target, config, machine, ProfileStore(Path("/nowhere/profiles"))).plan()
        if not found.memory.in_memory:
            assert not tight
            continue
        assert found.on_cards.left(found.needs).total <= found.memory.budget
        assert found.products is not None
        if found.rereads:
            assert found.needs.rows >= found.products.sent_from
            tight.append(found.needs.rows)
        else:
            assert not tight
    assert min(tight) < max(tight)  # passes are shorter, rather than without weights that are read again


def test_free_memory_is_read_once_in_a_load(q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[FreeMemory] = []
    once = FreeMemory.read

    def counted() -> FreeMemory:
        read.append(once())
        return read[-1]

    monkeypatch.setattr(FreeMemory, "read", counted)
    with load(q4_drafter_path, draft="auto", context=128, parallel=2, offload="stream") as engine:
        assert engine.memory.budget_bytes == read[0].budget()
    assert len(read) == 1
