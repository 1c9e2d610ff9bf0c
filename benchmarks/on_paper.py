"""Predict how models that are not here would run, for a table of docs/benchmarks.md.

    python -m benchmarks.on_paper
    python -m benchmarks.on_paper --disk 0.5e9 --memory 8 16

Computed, not measured: files get the headers of real models in Q4_K_M, and no weights. The planner measures
how fast this processor multiplies by weights of these types, as `edgespec plan` does for a model that never
ran here; the speed of the disk is given. Run it while nothing else runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import parser_of, print_head, write_hollow
from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.errors import MemoryLimitError
from edgespec.models.gguf.weightless import ModelShape
from edgespec.models.hub import catalog
from edgespec.planning.report.model_report import plan_for
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key

_GB = 1e9
_TARGETS = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
_DRAFTER = "qwen2.5-0.5b"


def main() -> None:
    """Print the table in Markdown."""
    parser = parser_of(__doc__)
    parser.add_argument("--memory", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="GiB")
    parser.add_argument("--disk", type=float, default=3.5e9, help="bytes a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = ProfileStore(folder / "profiles")
        drafter = write_hollow(folder / f"{_DRAFTER}-q4_k_m.gguf", _shape(_DRAFTER))
        store.put(disk_key(drafter), DiskProfile(options.disk, options.disk, 1 << 20, 4))
        print_head("model (Q4_K_M)", *(f"{memory} GiB" for memory in options.memory))
        for name in _TARGETS:
            model = write_hollow(folder / f"{name}-q4_k_m.gguf", _shape(name))
            cells = [cell(model, drafter, memory << 30, store) for memory in options.memory]
            print(f"| {name}, {model.stat().st_size / _GB:.1f} GB | {' | '.join(cells)} |", flush=True)


def _shape(name: str) -> ModelShape:
    shape = catalog.entries()[name].shape
    assert shape is not None
    return shape


def cell(model: Path, drafter: Path, memory: int, store: ProfileStore) -> str:
    """Tokens a second, and in brackets those of plain decoding; bold where weights are streamed."""
    try:
        asked = Config.of(model=model, draft=drafter, memory=memory, gpu_layers=0)
        plan = plan_for(asked, no_progress, store, estimated=True)
    except MemoryLimitError:
        return "too little"
    best, plain = plan.chosen.tokens_per_second, plan.plain.tokens_per_second
    speed = f"**{best:.1f}**" if plan.plain.holding.streamed_bytes else f"{best:.1f}"
    return f"{speed} ({plain:.1f})"


if __name__ == "__main__":
    main()
