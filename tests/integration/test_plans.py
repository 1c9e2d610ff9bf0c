"""`edgespec plan` with real models: where its figures come from, and that they count what runs do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.errors import MemoryLimitError
from edgespec.files.user_folders import cache_folder
from edgespec.kernels.report import ROWS
from edgespec.llama.row_rule import SPARING
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import BLOCK_SIZES
from edgespec.models.hub.registry import REGISTERED, DrafterPair, PairRegistry
from edgespec.models.hub.repository import Hub
from edgespec.planning.devices import machine
from edgespec.planning.report.model_report import plan_for
from edgespec.planning.report.report import PlanReport
from edgespec.profiles.store import DiskProfile, PassProfile, ProfileStore, disk_key, machine_identity
from tests.least_memory import least_memory
from tests.tiers import slow_except

THREADS = 1
Q4_1 = 3
COMPUTE = Curve.through([(1, 0.010), (8, 0.030), (32, 0.090), (64, 0.170)])


@pytest.fixture
def store(tmp_path: Path, smol_path: Path) -> ProfileStore:
    """A machine on which passes of the target in memory and its disk were measured."""
    store = ProfileStore(tmp_path / "profiles")
    key = {"threads": str(THREADS), "model": read_header(smol_path).fingerprint, "mode": "None packed"}
    store.put(machine_identity() | key, PassProfile(COMPUTE))
    store.put(disk_key(smol_path), DiskProfile(1e8, 1e8, 1 << 20, 1))
    return store


def planned(target: Path, store: ProfileStore, memory: int, draft: Path | str = "none") -> PlanReport:
    asked = Config.of(model=target, draft=draft, memory=memory, context=512, threads=THREADS)
    return plan_for(asked, no_progress, store)


@pytest.mark.slow
def test_the_first_command_of_all_may_be_a_plan(smol_path: Path, tmp_path: Path) -> None:
    """Nothing is known of the machine: no kernels were tried, and no pass was measured."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "edgespec", "plan", str(smol_path), "--draft", "none", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plain"]["tokens_per_second"] > 0
    assert found["uncertain"] is True


def test_a_model_of_the_catalog_is_planned_without_a_network(
    store: ProfileStore, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path / "hub")
    monkeypatch.setattr(Hub, "from_environment", classmethod(lambda _: hub))
    store.put(disk_key(cache_folder()), DiskProfile(1e9, 1e9, 1 << 20, 1))
    for type_id in BLOCK_SIZES:
        key = machine_identity() | {"threads": str(THREADS), "type": str(type_id)}
        store.put_products(key, [1e-10, 2e-10, 8e-10])
    asked = Config.of(
        model="llama3.3:70b", draft="llama3.2-1b", memory=16 << 30, context=512, threads=THREADS
    )
    plan = plan_for(asked, no_progress, store)
    (said,) = (note for note in plan.notes if "127.0.0.1:9 cannot be reached" in note)
    assert "The figures are approximate" in said
    assert any("its size is approximate" in note for note in plan.notes)
    assert plan.uncertain
    assert plan.chosen.drafter == "llama3.2-1b"
    held = plan.chosen.holding
    assert held.resident_bytes + held.streamed_bytes == pytest.approx(42e9, rel=0.05)


@pytest.mark.parametrize("named", slow_except([False], [True, False]))
def test_an_agreement_that_was_measured_is_not_assumed(
    smol_path: Path, q4_drafter_path: Path, store: ProfileStore, tmp_path: Path, *, named: bool
) -> None:
    target = Path(shutil.copy(smol_path, tmp_path / "target.gguf"))
    draft = q4_drafter_path if named else "auto"
    PairRegistry().add(
        DrafterPair(
            read_header(target).fingerprint, target.name, str(q4_drafter_path), REGISTERED, 0.83, 0.95, 400
        )
    )
    plan = planned(target, store, 4 << 30, draft)
    (said,) = (note for note in plan.notes if note.startswith("Tokens a pass"))
    assert "agreement on 83% of tokens, measured on this machine" in said
    assert not any("assumed" in note for note in plan.notes)
    (two,) = (size for size in plan.sizes if size.nodes == 2)
    assert two.tokens_per_pass == pytest.approx(1.83)


def test_a_guess_is_not_compared_with_figures(smol_path: Path, store: ProfileStore, tmp_path: Path) -> None:
    target = Path(shutil.copy(smol_path, tmp_path / "target.gguf"))
    found = planned(target, store, 4 << 30, "auto")
    assert found.drafter == "prompt lookup", "as a chat drafts"
    assert found.chosen.tokens_per_second == found.plain.tokens_per_second
    asked = planned(target, store, 4 << 30, "lookup")
    assert {size.drafter for size in asked.sizes} == {"prompt lookup"}
    assert len(asked.sizes) > 1
    assert any("an estimate" in note for note in asked.notes)


@pytest.mark.slow
def test_passes_beside_a_drafter_count_what_is_streamed_then(
    smol_path: Path, q4_drafter_path: Path, store: ProfileStore
) -> None:
    """The target fits alone, and not beside its drafter."""
    roomy = planned(smol_path, store, 4 << 30, q4_drafter_path)
    with_drafter = roomy.chosen
    # Between the least that streaming needs and what all of it needs; both depend on the processor.
    least = least_memory(smol_path, draft=q4_drafter_path, context=512)
    memory = max(least + 2_000_000, with_drafter.holding.needed - 30_000_000)
    tight = planned(smol_path, store, memory, q4_drafter_path)
    assert tight.plain.holding.streamed_bytes == 0
    drafted = [size for size in tight.sizes if size.drafter != "none"]
    assert drafted
    for size in drafted:
        assert size.holding.streamed_bytes > 0
        assert size.read_s > 0
        assert size.pass_s >= size.read_s


@pytest.mark.parametrize("own", [False, True])
def test_streamed_passes_are_padded_as_exact_decoding_pads_them(
    own: bool, smol_path: Path, store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "own_in_use", lambda: own)
    needed = planned(smol_path, store, 4 << 30).plain.holding.needed
    for short in (1_000_000, 20_000_000):
        try:
            streamed = planned(smol_path, store, needed - short).plain
        except MemoryLimitError:
            continue
        if streamed.holding.streamed_bytes:
            padded = COMPUTE.at(SPARING.rules[0].padded(1))
            assert streamed.compute_s < padded if own else streamed.compute_s >= padded
            return
    pytest.fail("nothing was streamed")


def test_derived_passes_follow_the_types_and_sizes_of_the_matrices(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass multiplies by each matrix once, so its time is a sum over matrices."""
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    store = ProfileStore(tmp_path / "profiles")
    header = read_header(smol_path)
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    speeds = dict.fromkeys({tensor.type_id for tensor in matrices}, (1e-09, 1e-08, 1e-07))
    speeds[Q4_1] = (2e-9, 4e-8, 8e-7)
    for type_id, seconds in speeds.items():
        store.put_products(machine_identity() | {"threads": str(THREADS), "type": str(type_id)}, seconds)
    derived = DerivedPasses(store, THREADS, no_progress)
    curve = derived.curve([header])
    assert curve.rows == ROWS
    products = [sum(t.n_bytes * speeds[t.type_id][at] for t in matrices) for at in range(len(ROWS))]
    for rows, seconds, expected in zip(ROWS, curve.seconds, products, strict=True):
        assert expected < seconds < expected + 0.001 * rows * (header.block_count or 0)
    assert not derived.disturbed, "nothing was measured"


@pytest.mark.slow
def test_embeddings_that_are_only_looked_up_take_no_time(smol_path: Path, tmp_path: Path) -> None:
    """A pass does not multiply by the embeddings where the output has a matrix of its own."""
    header = read_header(smol_path)
    tied = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    untied = replace(header, tensors=(*header.tensors, replace(tied, name="output.weight")))
    derived = DerivedPasses(ProfileStore(tmp_path / "profiles"), THREADS, no_progress)
    derived.curve([header])  # measures
    assert derived.curve([untied]) == derived.curve([header])
