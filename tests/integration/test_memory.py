"""What the program may hold: imports, caches, and whole runs in a control group."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from edgespec.models.batch import Batch
from edgespec.models.branches import PART, BranchingCache
from edgespec.models.runtime import Context, Model

_IMPORTS = """
import sys, edgespec
with edgespec.load({model!r}, draft={draft!r}, context=256, threads=1) as engine:
    config = edgespec.GenerationConfig(max_tokens=8, temperature=0.8, top_p=0.9, seed=1)
    assert engine.generate("one two three one two three one two", config, raw=True).tokens
print([name for name in ("torch", "hf_xet", "huggingface_hub") if name in sys.modules])
"""


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_answers_need_no_large_library(draft: str, smol_path: Path, q4_drafter_path: Path) -> None:
    program = _IMPORTS.format(model=str(smol_path), draft=str(q4_drafter_path) if draft == "model" else draft)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.stdout.strip() == "[]", child.stderr


@pytest.mark.parametrize("name", ["smol", "gemma"])  # the latter has sliding windows
def test_compaction_copies_a_part_at_a_time_and_changes_no_bit(
    name: str, smol_path: Path, gemma_path: Path
) -> None:
    path = {"smol": smol_path, "gemma": gemma_path}[name]
    text = np.random.default_rng(0).integers(0, 40_000, 700).astype(np.int32)
    peaks: list[int] = []
    with Model(path) as model:
        context = Context(model, n_cells=2048, n_rows=64, n_outputs=8, n_sequences=8, n_threads=1)
        cache = BranchingCache(context, ordered=True)

        def logits_behind_text(cut: bool) -> np.ndarray:
            """(8, n_vocab) with rejected rows between those of the text where `cut`."""
            cache.clear()
            for start in range(0, 650, 50):
                cache.append(Batch.run(text[start : start + 50], start, cache.open_paths), 56)
                if cut:
                    cache.try_branches(Batch.run(text[:7], start + 50, 1, "all"), 8)
                    cache.commit(0, 0, 1, 7)
            cache.open(3)
            tracemalloc.start()
            cache.compact()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            cache.try_branches(Batch.run(text[650:658], 650, 3, "all"), 8)
            values = context.logits().copy()
            cache.commit(2, 8, 3, 8)
            return values

        np.testing.assert_array_equal(logits_behind_text(cut=True), logits_behind_text(cut=False))
        assert cache.compactions == 2
        part = len(cache.save(0, PART))
        context.close()
    assert part > 1 << 20
    assert max(peaks) < 1.5 * part
