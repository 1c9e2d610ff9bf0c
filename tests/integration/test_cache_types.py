"""Quantized keys and values, and LoRA adapters: exact as ever, and refused where they cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.errors import MemoryLimitError, ModelFileError, UsageError
from edgespec.generation.result import Generation
from edgespec.llama.cache.shared_cells import PART
from edgespec.llama.dry_run import Shape, dry_run
from edgespec.models.gguf.footprint import cells_for
from edgespec.models.gguf.header import read_header
from edgespec.planning.report.model_report import plan_for
from edgespec.planning.report.report import PlanReport
from tests.fuzz.headers import UINT32, parse
from tests.least_memory import least_memory
from tests.program import run_here
from tests.tiny import write_tiny
from tests.tiny_adapters import write_adapter

PROMPT = "Once upon a time there was a fox who lived by the sea and"
CONFIG = GenerationConfig(max_tokens=32)


@pytest.fixture(scope="module")
def tiny(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", smol_path)


def answers(model: Path, draft: str, budget: int | None, **more: object) -> Generation:
    options = {"context": 256, "threads": 1, "exact": True, "tree_budget": budget, **more}
    with edgespec.load(model, draft=draft, **options) as engine:  # type: ignore[arg-type]
        return engine.generate(PROMPT, CONFIG, raw=True)


def test_a_quantized_cache_takes_half_the_memory(smol_path: Path) -> None:
    half, quantized = (dry_run(smol_path, [Shape(1024, 64, 64, 64, kv)]) for kv in ("f16", "q8_0"))
    assert half is not None
    assert quantized is not None
    assert quantized[0].cache == pytest.approx(half[0].cache * 34 / 64, rel=0.01)


def test_a_quantized_cache_is_exact(short_path: Path) -> None:
    """The text is that of plain decoding with the same cache, whatever is drafted."""
    plain = answers(short_path, "none", None, kv="q8_0")
    assert plain.exact
    for draft, budget in ((str(short_path), 12), ("lookup", 8)):
        drafted = answers(short_path, draft, budget, kv="q8_0")
        assert drafted.tokens == plain.tokens
        assert max(record.nodes for record in drafted.passes) > 1


def test_a_model_whose_heads_do_not_fit_is_refused(smol_path: Path, tmp_path: Path) -> None:
    header = read_header(smol_path)
    assert header.architecture == "llama"
    odd = tmp_path / "odd.gguf"
    data = bytearray(smol_path.read_bytes())
    # Nine heads of 64 elements become eighteen of 32, and then six of 96; only 40 would not fit.
    key = b"llama.attention.head_count"
    at = data.index(key + b"\x04\x00\x00\x00") + len(key) + 4
    data[at : at + 4] = (24).to_bytes(4, "little")
    odd.write_bytes(data)
    with pytest.raises(UsageError, match="has heads of 24 elements, but q8_0 needs blocks of 32"):
        edgespec.load(odd, draft="none", kv="q8_0")
    with pytest.raises(UsageError, match=r"kv must be f16 or q8_0\, not 'q9'\."):
        edgespec.load(smol_path, kv="q9")


def test_an_adapter_changes_the_text_and_keeps_it_exact(tiny: Path, tmp_path: Path) -> None:
    lora = str(write_adapter(tmp_path / "adapter.gguf"))
    bare = answers(tiny, "none", None)
    adapted = answers(tiny, "none", None, lora=[lora])
    assert adapted.tokens != bare.tokens
    assert answers(tiny, "none", None, lora=[f"{lora}:0"]).tokens == bare.tokens
    assert answers(tiny, "none", None, lora=[f"{lora}:0.5"]).tokens != adapted.tokens
    other = str(write_adapter(tmp_path / "other.gguf", seed=1))
    assert answers(tiny, "none", None, lora=[lora, other]).tokens != adapted.tokens
    drafted = answers(tiny, str(tiny), 12, lora=[lora])  # by the model without the adapter
    assert drafted.tokens == adapted.tokens


def test_adapters_that_cannot_be_applied_are_refused(tiny: Path, smol_path: Path, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / "adapter.gguf")
    with pytest.raises(ModelFileError, match="cannot be applied to"):
        edgespec.load(smol_path, draft="none", lora=[str(lora)])
    with pytest.raises(ModelFileError, match="is a GGUF file but not a LoRA adapter"):
        edgespec.load(smol_path, draft="none", lora=[str(smol_path)])
    other = write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(ModelFileError, match=r"is for qwen2 models, and tiny\.gguf is a llama model"):
        edgespec.load(tiny, draft="none", lora=[str(other)])
    with pytest.raises(UsageError, match=r"The scale of LoRA adapter .* not inf"):
        edgespec.load(tiny, draft="none", lora=[f"{lora}:inf"])
    with pytest.raises(ModelFileError, match="does not exist"):
        edgespec.load(tiny, draft="none", lora=[str(tmp_path / "none.gguf")])


def test_an_adapter_that_llama_cpp_aborts_on_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    header = parse(write_adapter(path).read_bytes())
    header.change("adapter.lora.alpha", 8)  # no number of single precision, which llama.cpp asserts
    at = header.index("adapter.lora.alpha")
    header.entries[at] = replace(header.entries[at], type_id=UINT32)
    path.write_bytes(header.to_bytes())
    done = run_here("generate", str(tiny), "-p", "Hi", "--draft", "none", "--lora", str(path))
    assert done.returncode == 1
    assert f"llama.cpp fails to load {path} (abort)." in " ".join(done.stderr.split())


def test_adapters_need_all_weights_in_memory(tiny: Path, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / "adapter.gguf")
    with pytest.raises(UsageError, match="LoRA adapters need all weights in memory"):
        edgespec.load(tiny, draft="none", context=256, lora=[str(lora)], offload="stream")


@pytest.mark.slow
def test_a_plan_counts_the_cache_and_adapters(smol_path: Path, tiny: Path, tmp_path: Path) -> None:
    """Its counts are those that loading would find: all of it, or nothing that can be run."""

    def planned(model: Path, memory: int = 1 << 30, **more: object) -> PlanReport:
        asked = Config.of(model=model, draft="none", memory=memory, context=1024, **more)
        return plan_for(asked, no_progress, estimated=True)  # the type changes buffers a little, too

    half, quantized = (planned(smol_path, kv=kv) for kv in ("f16", "q8_0"))
    assert half.cache_bytes == 1024 * 30 * 2 * 3 * 64 * 2, (
        "tokens, layers, keys and values, heads, elements, bytes"
    )
    assert quantized.cache_bytes == half.cache_bytes * 34 // 64
    saved = half.chosen.holding.needed - quantized.chosen.holding.needed
    cells = cells_for(1024) + PART  # those of a part are in memory twice while it is moved
    assert saved == pytest.approx(cells * half.cache_bytes / 1024 * 30 / 64, rel=0.01)

    adapter = write_adapter(tmp_path / "adapter.gguf")
    alone, adapted = planned(tiny), planned(tiny, lora=(f"{adapter}:0.5", str(adapter)))
    assert adapted.adapter_bytes == 2 * adapter.stat().st_size
    assert adapted.chosen.holding.needed == alone.chosen.holding.needed + adapted.adapter_bytes
    assert adapted.to_json()["adapter_bytes"] == adapted.adapter_bytes
    with pytest.raises(UsageError, match="LoRA adapters need all weights in memory"):
        planned(smol_path, half.chosen.holding.needed * 9 // 10, lora=(str(adapter),))
    with pytest.raises(ModelFileError, match="adapter"):
        planned(tiny, lora=(str(smol_path),))


_HELD = """
import json, sys, edgespec
model, budget, context = json.loads(sys.argv[1])
options = {"draft": "none", "context": context, "kv": "q8_0", "offload": "stream"}
with edgespec.load(model, memory=budget, **options) as engine:
    text = "The river was high that spring, and nobody crossed it without a reason. " * 200
    answer = engine.generate(text, edgespec.GenerationConfig(max_tokens=4), raw=True)
    rows = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").readlines()[1:])
    print(json.dumps([engine.target.context.n_cells, answer.prompt_tokens, int(rows["Anonymous:"]) * 1024]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process holds")
def test_a_long_context_is_planned_and_held_within_the_budget(short_path: Path) -> None:
    """Keys and values of 32,768 tokens in eight bits, and a prompt of thousands, in the least memory."""
    context = 32_768
    budget = least_memory(short_path, context=context, kv="q8_0", threads=2) + (8 << 20)
    asked = Config.of(model=short_path, draft="none", memory=1 << 30, context=context, kv="q8_0")
    planned = plan_for(asked, no_progress)
    layers = read_header(short_path).block_count or 0
    assert planned.cache_bytes == context * layers * 2 * 3 * 64 * 34 // 32
    with pytest.raises(MemoryLimitError, match=f"a context of {context} tokens needs") as refused:
        edgespec.load(short_path, draft="none", memory=planned.cache_bytes, context=context, kv="q8_0")
    assert refused.value.least is not None
    assert refused.value.least > planned.cache_bytes
    request = json.dumps([str(short_path), budget, context])
    child = subprocess.run(
        [sys.executable, "-c", _HELD, request], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    cells, prompt, held = json.loads(child.stdout)
    assert cells >= context
    assert prompt > 2000
    assert planned.cache_bytes < held < budget
