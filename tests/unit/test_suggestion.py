"""The model suggested to a newcomer, by memory and disk."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.cli.conversation.welcome import welcome_lines
from edgespec.errors import UsageError
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.footprint import cell_bytes, state_bytes
from edgespec.models.gguf.types import BLOCK_SIZES
from edgespec.models.hub import catalog
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.report.suggestion import USABLE, Resources, estimate, suggest
from edgespec.profiles.store import ProfileStore, machine_identity
from tests.tiers import slow_except

GIB = 1 << 30
BYTE_S = 1 / 25e9  # for a byte of weights

Machine = Callable[..., Resources]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine of so much memory, with a figure for every type of weights, whatever runs the tests."""

    def resources(
        memory: int,
        disk: int = 500 * GIB,
        *,
        disk_rate: float = 3.5e9,
        byte_s: float = BYTE_S,
        here: frozenset[str] = frozenset(),
        threads: int = 8,
    ) -> Resources:
        store = ProfileStore(tmp_path / f"{byte_s} {threads}")
        for type_id in BLOCK_SIZES:
            key = machine_identity() | {"threads": str(threads), "type": str(type_id)}
            store.put_products(key, [byte_s * max(1.0, rows / 4) for rows in (1, 8, 32)])
        snapshot = MachineSnapshot(FreeMemory(memory), threads, own_kernels=True)
        return Resources(snapshot, disk, store, disk_rate, here)

    return resources


@pytest.mark.slow
def test_more_memory_suggests_larger_models(machine: Machine) -> None:
    chosen = [suggest(machine(memory * GIB))[-1] for memory in (3, 6, 24, 96)]
    sizes = [found.entry.parameters for found in chosen]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_a_mixture_takes_the_time_of_its_active_experts(machine: Machine) -> None:
    """A mixture is faster than a dense model of about its size in memory, in proportion to its products."""
    large = machine(64 * GIB)
    mixture, dense = (estimate(catalog.entries()[name], large) for name in ("qwen3.6-35b-a3b", "qwen3-32b"))
    assert mixture is not None
    assert dense is not None
    assert not mixture.streams
    assert mixture.tokens_per_second > 4 * dense.tokens_per_second


def test_a_mixture_reads_the_experts_that_it_misses(machine: Machine) -> None:
    found = estimate(catalog.entries()["qwen3.6-35b-a3b"], machine(12 * GIB))
    assert found is not None
    experts = found.plan.holding.experts
    assert experts is not None
    assert experts.n_needed == 8 * 40
    assert 0 < found.plan.holding.streamed_bytes < 0.1 * found.entry.n_bytes
    quick, slow = (estimate(found.entry, machine(12 * GIB, disk_rate=rate)) for rate in (7e9, 0.5e9))
    assert quick is not None
    assert slow is not None
    assert quick.tokens_per_second > found.tokens_per_second > slow.tokens_per_second


def test_a_larger_dense_model_is_streamed_with_a_drafter(machine: Machine) -> None:
    found = estimate(catalog.entries()["qwen3-32b"], machine(12 * GIB, disk_rate=14e9))
    assert found is not None
    assert found.streams
    assert found.plan.drafter is not None
    assert found.drafter in found.entry.drafters
    assert found.download_bytes == found.entry.n_bytes + catalog.entries()[found.drafter].n_bytes


def test_a_small_disk_or_memory_leaves_models_out(machine: Machine) -> None:
    for found in suggest(machine(64 * GIB, 12 * GIB)):
        assert found.download_bytes < 12 * GIB
    assert suggest(machine(64 * GIB, GIB)) == []
    assert suggest(machine(GIB // 2)) == []


def test_what_is_here_is_not_downloaded_again(machine: Machine) -> None:
    found = suggest(machine(12 * GIB, 100 * GIB, here=frozenset(catalog.entries())))
    assert found[0].download_bytes == 0
    assert welcome_lines(found)[1].endswith("(installed)")


def test_the_lines_have_the_commands(machine: Machine) -> None:
    toy, *models = welcome_lines(suggest(machine(12 * GIB, disk_rate=7e9)))
    assert toy == "This is SmolLM2 135M, the bundled demo model. Better models for this machine:"
    pattern = r"  about [\d.]+ tokens/s: edgespec chat \S+( --draft \S+)? \([\d.]+ [GM]iB\)"
    assert 3 <= len(models) <= 5
    assert all(re.fullmatch(pattern, line) for line in models)
    assert max(map(len, [toy, *models])) < 80
    assert welcome_lines([]) == [
        "This is SmolLM2 135M, the bundled demo model.",
        f"No larger model in the catalog would reach {USABLE:.0f} tokens/s here.",
    ]


@pytest.mark.parametrize(
    ("memory", "disk_rate", "byte_s"),
    slow_except([(2, 7e9, BYTE_S)], itertools.product((2, 16), (1e8, 7e9), (BYTE_S, 20 * BYTE_S))),
)
def test_only_usable_models_are_suggested(
    memory: int, disk_rate: float, byte_s: float, machine: Machine
) -> None:
    found = suggest(machine(memory * GIB, disk_rate=disk_rate, byte_s=byte_s))
    assert len(found) <= 5
    assert all(suggestion.tokens_per_second >= USABLE for suggestion in found)
    sizes = [suggestion.entry.parameters for suggestion in found]
    assert sizes == sorted(set(sizes))


def test_a_machine_too_slow_for_all_of_them_is_told_so(machine: Machine) -> None:
    assert suggest(machine(24 * GIB, byte_s=1e-8)) == []


@pytest.mark.slow
def test_measured_products_decide(machine: Machine) -> None:
    quick, slow = (suggest(machine(12 * GIB, byte_s=byte_s))[-1] for byte_s in (BYTE_S / 4, 8 * BYTE_S))
    assert quick.entry.parameters > slow.entry.parameters


def test_every_suggested_model_can_be_pulled_planned_and_drafted_for() -> None:
    suggested = [entry for entry in catalog.entries().values() if entry.suggested]
    assert len(suggested) > 4
    for entry in suggested:
        assert entry.repo
        assert entry.hollow
        assert all(catalog.entries()[name].hollow for name in entry.drafters)


def test_models_without_weights_have_the_sizes_of_the_catalog() -> None:
    """A slip in one of the shapes' figures would show."""
    for entry in catalog.entries().values():
        if entry.hollow is not None:
            (header,) = entry.hollow.headers
            parameters = sum(math.prod(tensor.shape) for tensor in header.tensors)
            assert parameters == pytest.approx(entry.parameters, rel=0.03), entry.name
            assert header.tensor_bytes == pytest.approx(entry.n_bytes, rel=0.06), entry.name


def test_other_quantizations_have_the_sizes_of_published_files() -> None:
    """Of files of Qwen2.5 72B, in 10^9 bytes."""
    entry = catalog.entries()["qwen2.5-72b"]
    for quant, size in {
        **{"Q2_K": 29.8, "Q3_K_S": 34.5, "q3_k_m": 37.7, "IQ4_XS": 40.2, "Q4_0": 41.2, "Q4_K_S": 43.9},
        **{"Q4_K_M": 47.4, "Q6_K": 64.3, "Q8_0": 77.3, "UD-Q4_K_XL": 47.4, "FP16": 145.4},
    }.items():
        hollow = entry.hollow_in(quant)
        assert hollow is not None
        assert hollow.tensor_bytes == pytest.approx(size * 1e9, rel=0.05), quant
    assert entry.hollow_in("q8") == entry.hollow_in("Q8_0")
    with pytest.raises(UsageError, match="There is no quantization 'Q9_K'"):
        entry.hollow_in("Q9_K")


def test_the_models_of_the_computed_table_are_in_the_catalog() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "benchmarks.md").read_text(encoding="utf-8")
    table = re.findall(r"\| Qwen2.5 (\d+)B, ([\d.]+) GB \|", page)
    assert table
    for size, gigabytes in table:
        entry = catalog.entry_for(f"qwen2.5:{size}b")
        assert entry is not None
        assert entry.n_bytes == pytest.approx(float(gigabytes) * 1e9, rel=0.1)


def test_hybrids_keep_cells_in_their_layers_with_attention_alone() -> None:
    """The figures are those that others publish for these models."""
    for name, cell_kib, state_mb in (("qwen3.8-27b", 64, 157), ("qwen3.6-35b-a3b", 20, 66)):
        hollow = catalog.entries()[name].hollow
        assert hollow is not None
        (header,) = hollow.headers
        assert cell_bytes(header) == cell_kib << 10
        assert state_bytes(header) == pytest.approx(state_mb * 1e6, rel=0.01)
    dense = catalog.entries()["qwen3-8b"].hollow
    assert dense is not None
    assert (cell_bytes(dense.headers[0]) >> 10, state_bytes(dense.headers[0])) == (144, 0)


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME"])
def test_this_machine_can_be_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/nowhere/at/all")
    found = Resources.of_this_machine(ProfileStore())
    assert found.machine.free.budget() > 0
    assert found.disk > 0
    assert found.here == frozenset()
