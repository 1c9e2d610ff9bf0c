"""Memory limits of the program: imports, caches, and whole runs in a control group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from benchmarks.capped import cap_kind, run_capped
from edgespec.base.libraries import c_library
from edgespec.errors import MemoryLimitError
from edgespec.generation.config import GenerationConfig
from edgespec.llama.cache.kv_cache import open_cache
from edgespec.llama.cache.shared_cells import PART
from edgespec.llama.dry_run import AllocationStore, Shape, dry_run
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.machine.disks import TMPFS, disk_of
from edgespec.models.gguf.footprint import vocabulary_bytes, work_bytes
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing.pack import gains_from_packing
from tests.least_memory import least_memory
from tests.tiers import slow_except

says_what_is_held = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process holds")

_IMPORTS = """
import sys, edgespec
with edgespec.load({model!r}, draft={draft!r}, context=256, threads=1) as engine:
    config = edgespec.GenerationConfig(max_tokens=8, temperature=0.8, top_p=0.9, seed=1)
    assert engine.generate("one two three one two three one two", config, raw=True).tokens
print([name for name in ("torch", "hf_xet", "huggingface_hub") if name in sys.modules])
"""


@pytest.mark.parametrize("draft", slow_except(["model"], ["none", "lookup", "model"]))
def test_answers_need_no_large_library(draft: str, short_path: Path, short_q4_path: Path) -> None:
    program = _IMPORTS.format(model=str(short_path), draft=str(short_q4_path) if draft == "model" else draft)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.stdout.strip() == "[]", child.stderr


_VOCABULARY = """
from pathlib import Path
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.model import Model
from edgespec.machine.memory import release_free_memory

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

start_backend()
release_free_memory()
before = anonymous()
with Model(Path({model!r}), vocabulary_only=True):
    print(anonymous() - before)
"""


@says_what_is_held
@pytest.mark.skipif(not hasattr(c_library(), "malloc_trim"), reason="only glibc returns what was freed")
def test_a_vocabulary_takes_what_is_planned(gemma_path: Path) -> None:
    """What llama.cpp frees while it loads one, a fifth of its peak, is not kept by malloc."""
    program = [sys.executable, "-c", _VOCABULARY.format(model=str(gemma_path))]
    taken = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    planned = vocabulary_bytes(read_header(gemma_path))
    assert 0.8 * planned < taken < 1.1 * planned


@pytest.mark.parametrize("name", slow_except(["smol"], ["smol", "gemma"]))  # the latter has sliding windows
def test_compaction_copies_a_part_at_a_time_and_changes_no_bit(
    name: str, smol_path: Path, gemma_path: Path
) -> None:
    path = {"smol": smol_path, "gemma": gemma_path}[name]
    text = np.random.default_rng(0).integers(0, 40_000, 360).astype(np.int32)
    peaks: list[int] = []
    with Model(path) as model:
        context = Context(model, n_cells=1024, n_rows=64, n_outputs=8, n_sequences=8, n_threads=1)
        cache = open_cache(context, ordered=True)

        def logits_behind_text(cut: bool) -> np.ndarray:
            """(8, n_vocab) with rejected rows between those of the text where `cut`."""
            cache.clear()
            for start in range(0, 350, 50):
                cache.append(TokenBatch.run(text[start : start + 50], start, cache.open_paths), 56)
                if cut:
                    cache.try_branches(TokenBatch.run(text[:7], start + 50, 1, "all"), 8)
                    cache.commit(0, 0, 1, 7)
            cache.open(3)
            tracemalloc.start()
            cache.compact()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            cache.try_branches(TokenBatch.run(text[350:358], 350, 3, "all"), 8)
            values = context.logits().copy()
            cache.commit(2, 8, 3, 8)
            return values

        np.testing.assert_array_equal(logits_behind_text(cut=True), logits_behind_text(cut=False))
        assert cache.compactions == 2
        part = len(cache.save(0, PART))
        context.close()
    assert part > 1 << 20
    assert max(peaks) < 1.5 * part


@says_what_is_held
@pytest.mark.parametrize("rows", slow_except([512], [64, 512]))
def test_a_dry_run_foretells_what_contexts_take(rows: int, q4_drafter_path: Path, tmp_path: Path) -> None:
    """Against the memory that a context really holds after a pass of as many rows as it takes."""
    program = f"""
import ctypes
from pathlib import Path
import numpy as np
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: what is touched counts, not what lies around it

def held():
    rows = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").readlines()[1:])
    return (int(rows["Anonymous:"]) + int(rows["Swap:"])) * 1024

with Model(Path({str(q4_drafter_path)!r}), memory_map=False) as model:
    before = held()
    context = Context(model, n_cells=1024, n_rows={rows}, n_outputs=64, n_sequences=64, n_threads=2)
    tokens = np.arange({rows}, dtype=np.int32) % 1000
    batch = TokenBatch.run(tokens, 0, 1, "all" if {rows} <= 64 else "last")
    context.decode(batch)
    context.decode(TokenBatch.run(tokens[:60], {rows}, 1, "all"))
    print(held() - before)
    context.close()
"""
    shape = Shape(1024, rows, 64, 64)
    header = read_header(q4_drafter_path)
    (found,) = dry_run(q4_drafter_path, [shape]) or [None]
    assert found is not None
    store = AllocationStore(tmp_path)
    assert store.get(header, [shape]) == store.get(header, [shape]) == [found]
    one_heap = os.environ | {"MALLOC_ARENA_MAX": "1"}  # however threads meet in malloc
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=one_heap
    )
    assert child.returncode == 0, child.stderr
    expected = found.cache + found.buffers + work_bytes([header], rows, 2, 1024)
    assert 0.75 * expected < int(child.stdout) < 1.03 * expected + (4 << 20)


def test_packing_holds_one_tensor_and_its_rearranged_copy(wide_path: Path, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from edgespec.models.gguf.header import read_header
from edgespec.llama.runtime.backend import start_backend
from edgespec.kernels.layouts import kernel_layout
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing import build
from edgespec.processes.limits import peak_rss
start_backend()
files = ModelFiles.of(read_header(Path({str(wide_path)!r})))
layers = files.layers()
places = [kernel_layout(t.type_id, t.shape) for layer in layers for t in layer.tensors]
before = peak_rss()
build.build_pack(Path({str(tmp_path)!r}) / "x.pack", files, layers)
print(peak_rss() - before)
"""
    files = ModelFiles.of(read_header(wide_path))
    if not gains_from_packing(files.layers()):
        pytest.skip("this processor has no kernel layout for these weights")
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    largest = max(tensor.n_bytes for layer in files.layers() for tensor in layer.tensors)
    assert int(child.stdout) < 2.2 * largest + (6 << 20)


def test_a_cache_folder_in_memory_holds_no_pack(
    q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path("/dev/shm")
    if not place.is_dir() or disk_of(place).kind != TMPFS:
        pytest.skip("no folder here lies in memory")
    if not gains_from_packing(ModelFiles.of(read_header(q4_drafter_path)).layers()):
        pytest.skip("this processor has no kernel layout for these weights")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        options: dict[str, Any] = {"draft": "none", "context": 256, "offload": "stream", "threads": 1}
        budget = least_memory(q4_drafter_path, exact=False, **options)
        with edgespec.load(q4_drafter_path, memory=budget, exact=False, **options) as engine:
            assert any("lies in memory" in note and "XDG_CACHE_HOME" in note for note in engine.notes)
            assert len(engine.generate("Hi", GenerationConfig(max_tokens=2), raw=True).tokens) > 0
        assert not list(Path(folder).rglob("*.pack"))
        with pytest.raises(MemoryLimitError) as caught:
            edgespec.load(q4_drafter_path, memory=budget, pack="always", **options)
        assert re.search(r"packed layer file takes .* lies in memory: set XDG_CACHE_HOME", caught.value.hint)
        assert not list(Path(folder).rglob("*.pack"))


@says_what_is_held
def test_mapped_weights_keep_to_the_budget(q4_drafter_path: Path) -> None:
    """Rearranged weights would be a copy in memory that nobody has asked for."""
    program = f"""
import json
import os
import edgespec
from edgespec.errors import MemoryLimitError

def load(memory):
    return edgespec.load({str(q4_drafter_path)!r}, draft="none", context=256, offload="mmap", memory=memory,
                         threads=2)
try:
    load(32 << 20)
except MemoryLimitError as error:
    least = error.least
with load(least + (8 << 20)) as engine:
    engine.generate("Hi", edgespec.GenerationConfig(max_tokens=4), raw=True)
    rows = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").readlines()[1:])
    print(json.dumps([least + (8 << 20), int(rows["Anonymous:"]) * 1024, engine.target.identity["kernels"]]))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    budget, held, kernels = json.loads(child.stdout)
    assert held < budget
    assert kernels == "plain"


_CAPPED = """
import json, sys
import edgespec
model, draft, memory, options, config, text = json.loads(sys.argv[1])
with edgespec.load(model, draft=draft, memory=memory, **options) as engine:
    answer = engine.generate(text, edgespec.GenerationConfig(**config), raw=True)
    engine.target.cache.compact()
    again = engine.generate(text + " and", edgespec.GenerationConfig(**config), raw=True)
    print(json.dumps([len(answer.tokens), answer.prompt_tokens, answer.memory.peak_rss_bytes,
                      answer.memory.streamed_bytes_per_pass]))
"""


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("lookup", {"exact": None, "offload": "stream"}),  # trees are sized by measured costs
        pytest.param(
            "model", {"exact": None, "offload": "stream", "tree_budget": 16}, marks=pytest.mark.slow
        ),
        pytest.param(
            "lookup", {"exact": False, "offload": "none", "tree_budget": 16}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_budget_holds_and_is_spent(
    draft: str, options: dict[str, Any], wide_path: Path, q4_drafter_path: Path
) -> None:
    """Packing, a long prompt, sampling from the whole vocabulary and compaction, all within 105 percent."""
    if cap_kind() == "none":
        pytest.skip("no control group can be made here")
    options = {**options, "context": 1024, "threads": 2}
    drafter = str(q4_drafter_path) if draft == "model" else draft
    # With trees of a fixed size, nothing is measured to find the budget.
    least = least_memory(wide_path, draft=drafter, pack="never", **{"tree_budget": 16, **options})
    budget = least + (64 << 20)
    config = {"max_tokens": 8, "temperature": 1.0, "top_k": 0, "seed": 3}
    text = " ".join(f"word{n % 89}" for n in range(190))
    request = json.dumps([str(wide_path), drafter, budget, options, config, text])
    ran = run_capped([sys.executable, "-c", _CAPPED, request], budget + budget // 20)
    assert not ran.killed, ran.errors
    assert ran.status == 0, ran.errors
    tokens, prompt, peak, streamed = json.loads(ran.output)
    assert tokens > 0
    assert prompt > 512
    assert (streamed > 0) == (options["offload"] == "stream")
    if streamed:
        # Of what is left, a layer of 13 MB may not fit, and 16 are the template's process.
        assert peak > 0.9 * budget - (29 << 20)


@pytest.mark.slow
def test_measuring_a_profile_keeps_to_the_budget(wide_path: Path, q4_drafter_path: Path) -> None:
    if cap_kind() == "none":
        pytest.skip("no control group can be made here")
    options = {"context": 512, "threads": 2, "offload": "stream"}
    least = least_memory(wide_path, draft=str(q4_drafter_path), pack="never", **options)
    budget = least + (64 << 20)
    command = [sys.executable, "-m", "edgespec", "profile", str(wide_path), "--draft", str(q4_drafter_path)]
    command += ["--context", "512", "--threads", "2", "--offload", "stream", "--pack", "never"]
    command += ["--memory", str(budget), "--seconds", "3", "--json"]
    ran = run_capped(command, budget + budget // 20)
    assert not ran.killed, ran.errors
    assert ran.status == 0, ran.errors
    found = json.loads(ran.output)
    assert found["memory_bandwidth"] > 1e8
    assert found["streamed_bytes_per_pass"] > 0
