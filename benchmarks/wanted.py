"""Qwen3.8-27B (Q4_K_M, 17.1 GB) on a machine of 16 GB: tokens per second by disk, cores and drafting.

    python -m benchmarks.wanted

Computed, not measured: the planner places the weights of a hollow model of the published sizes. A pass takes
as long for a byte of weights as in the table "Own kernels and a real pair" of docs/benchmarks.md, where two
cores were measured. More cores share the arithmetic; memory supplies all of them with what it supplied those
two, 40 GB/s. Disks are given. How many tokens a pass yields is assumed:

- A small drafter agrees on 70% of tokens, as plans assume of any pair that was not measured.
- The layer for multi-token prediction (MTP) in the file, as a chain of two: 2.6 tokens a pass. From 2.4 to
  2.9 are reported for this family.
- The same with trees: 3.0 tokens with 8 nodes, 3.5 with 32. Nobody has reported any such figure: a guess.

Nothing is measured now. Machines differ only in how large their kernels' layouts are.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import SLOWDOWN_BESIDE_READS, USUAL_OVERLAP
from edgespec.costs.planner import Drafting, Passes, Prediction, alternatives, best
from edgespec.costs.yields import Yields, expected_yields
from edgespec.loading.devices.machine import MachineSnapshot
from edgespec.loading.plan import Plan, Planner
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.hollow import ModelShape, hollow_files
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.plans.pass_costs import DIRECT_SHARE
from edgespec.profiles.store import ProfileStore

FILE_BYTES = 17_100_000_000
BUDGET = 14_000_000_000  # of 16 GB, for everything that EdgeSpec holds
# Seconds of passes over 1.1 GB of weights in Q4_K_M, by rows, on two cores of an AMD Zen 5 processor.
MEASURED = {1: 0.0272, 2: 0.0278, 4: 0.0293, 8: 0.0328, 16: 0.0517, 32: 0.0895, 64: 0.1677}
MEASURED_BYTES, MEASURED_CORES = 1.1e9, 2
MEMORY_RATE = MEASURED_BYTES / MEASURED[1]
DISKS, CORES = (0.5e9, 3.5e9, 7e9), (2, 8, 16)

SMALL = ModelShape(
    "qwen35",
    layers=24,
    width=1024,
    feed_forward=3584,
    heads=8,
    kv_heads=2,
    head=256,
    vocabulary=248_320,
    tied=True,
    attention_every=4,
    state_key_heads=16,
    state_value_heads=16,
    gated=True,
)
CHAIN = Yields(0, {1: 1.0, 2: 1.86, 3: 2.6}, {2: 1.0, 3: 2.0}, rows={2: 1.0, 3: 2.0})
TREE = Yields(
    0,
    {**CHAIN.tokens, 8: 3.0, 16: 3.25, 32: 3.5},
    {2: 1.0, 3: 2.0, 8: 3.0, 16: 4.0, 32: 5.0},
    rows={2: 1.0, 3: 2.0, 8: 6.0, 16: 13.0, 32: 28.0},
)


class Table:
    """The model and its drafters."""

    def __init__(self, folder: Path) -> None:
        self._store = ProfileStore(folder)
        shape = catalog.entries()["qwen3.8-27b"].shape
        assert shape is not None
        self._target = hollow_files("qwen3.8-27b", shape)
        self._small = hollow_files("small", SMALL, "Q8_0")
        self._mtp = hollow_files("mtp", replace(shape, layers=1, attention_every=1))
        # The file's types are somewhat larger than those of the shape; what is left over stays in memory.
        self._mtp_bytes = sum(layer.n_bytes for layer in self._mtp.layers())
        self._more_bytes = FILE_BYTES - self._target.tensor_bytes - self._mtp_bytes

    def ways(self, disk_rate: float, cores: int) -> list[Prediction]:
        """The best sizes without drafts, with a small drafter, and with chains and trees of MTP."""
        step = curve(self._mtp, cores)
        small = Drafting("small", expected_yields(0.7), curve(self._small, cores), 1.1)
        plain = self._plan(cores, self._more_bytes)
        drafted = self._plan(cores, self._more_bytes, self._small)
        with_layer = self._plan(cores, self._more_bytes + self._mtp_bytes)
        return [
            self._fastest(plan, drafting, disk_rate, cores)
            for plan, drafting in (
                (plain, Drafting("none")),
                (drafted, small),
                (with_layer, Drafting("MTP chain", CHAIN, step, 1.1)),
                (with_layer, Drafting("MTP tree", TREE, step, 1.1)),
            )
        ]

    def _plan(self, cores: int, beside: int, drafter: ModelFiles | None = None) -> Plan:
        machine = MachineSnapshot(FreeMemory(BUDGET), cores, own_kernels=True)
        config = Config.of(memory=BUDGET, gpu_layers=0)
        return Planner(self._target, config, machine, self._store, beside=beside).plan(drafter)

    def _fastest(self, plan: Plan, drafting: Drafting, disk_rate: float, cores: int) -> Prediction:
        compute = curve(self._target, cores).scaled(SLOWDOWN_BESIDE_READS)
        passes = plan.over(Passes(compute, disk_rate * DIRECT_SHARE, overlap=USUAL_OVERLAP))
        return best(alternatives(plan.holding, passes, drafting, plan.context.n_outputs))


def curve(files: ModelFiles, cores: int) -> Curve:
    """Passes on so many cores: no shorter than memory takes to supply the weights."""
    tensors = {tensor.name: tensor.n_bytes for tensor in files.headers[0].tensors}
    looked_up = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    multiplied = files.tensor_bytes - looked_up
    here = Curve.through(MEASURED.items()).scaled(multiplied / MEASURED_BYTES)
    return here.scaled(MEASURED_CORES / cores).floored(multiplied / MEMORY_RATE)


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder))
        print("| disk, GB/s | cores | none | small drafter | MTP chain | MTP tree | GB a pass | bound by |")
        print("|---" * 8 + "|")
        for disk_rate in DISKS:
            for cores in CORES:
                ways = table.ways(disk_rate, cores)
                speeds = (f"{way.tokens_per_second:.2f} ({way.nodes})" for way in ways)
                read = " to ".join(
                    f"{bound(way.holding.streamed_bytes for way in ways) / 1e9:.1f}" for bound in (min, max)
                )
                limits = ", ".join(way.bound for way in ways)
                print(f"| {disk_rate / 1e9:g} | {cores} | {' | '.join(speeds)} | {read} | {limits} |")


if __name__ == "__main__":
    main()
