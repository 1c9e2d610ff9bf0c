"""EdgeSpec's own kernels in real models: their bits depend on nothing, and where they fail, ggml's serve."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

import edgespec
from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import SequenceTree, TextSequence
from edgespec.engine.target import TargetPass
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.heads.hidden_states import LayerTap
from edgespec.kernels import ggml, products
from edgespec.kernels.attention import Attention
from edgespec.kernels.layouts import KernelLayout, kernel_layouts, looks_up_rows
from edgespec.kernels.native import library
from edgespec.kernels.products import Processor
from edgespec.kernels.setting import OWN, PLAIN, VARIABLE, setting_for
from edgespec.llama.first_layers import FirstLayers
from edgespec.llama.quantize import make_drafter
from edgespec.llama.row_rule import ANY_ROWS, FEW_PASSES, FREE, FREE_SPARING, find_row_rule
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.device_layers import ON_PROCESSOR
from edgespec.llama.runtime.model import Model
from edgespec.loading.streamed_model import open_streamed_model, prepare_stream
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, layers_of_each_kind
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.memory.needs import MemoryNeeds, tied_bytes
from edgespec.planning.memory.stream_layout import StreamLayout
from tests import tiny
from tests.integration.test_streaming import load_streamed
from tests.least_memory import load_in_least_memory
from tests.sabotage import sabotage
from tests.tiers import slow_except
from tests.tiny import write_tiny

_LENGTH = 66
F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_NL = 1, 2, 8, 12, 14, 20
CONFIG = GenerationConfig(max_tokens=24)
PROMPT = "Once upon a time"

# Spoils the plug in the process that tries the kernels.
SABOTAGE = """
import sys
if "edgespec.kernels.trial_worker" in sys.orig_argv:
    import ctypes
    from edgespec.kernels.native.library import NativeLibrary
    NativeLibrary.activate = lambda _library: ctypes.string_at(0)
"""

# No library was compiled of such sources.
NOT_COMPILED = """
from edgespec.kernels.native import build
build.sources_digest = lambda: "absent"
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> library.NativeLibrary:
    """The library, in use."""
    monkeypatch.setenv(VARIABLE, "edgespec")
    start_backend()
    if library.loaded() is None:
        pytest.skip(f"EdgeSpec's own kernels cannot be used here: {library.problem()}")
    assert [layout.name for layout in kernel_layouts()] == [OWN]
    return library.load()


@pytest.fixture
def own_layout(own: library.NativeLibrary) -> KernelLayout:
    return kernel_layouts()[0]


@pytest.fixture(params=slow_except(["short_path"], ["short_path", "gemma_path"]))
def model_path(request: pytest.FixtureRequest) -> Path:
    """Q4_1 with heads of 64, three to a head of keys; and Q4_K_M with heads of 256, and sliding windows."""
    path: Path = request.getfixturevalue(request.param)
    return path


def logits(model: Model, *, rows: int, n_threads: int = 2, n_tokens: int = _LENGTH) -> np.ndarray:
    """The logits of a chain of tokens that is decoded with this many rows at a time."""
    context = Context(
        model, n_cells=1024, n_rows=n_tokens, n_outputs=n_tokens, n_sequences=1, n_threads=n_threads
    )
    tokens = np.random.default_rng(0).integers(0, model.vocabulary.n_tokens, n_tokens, dtype=np.int32)
    found = []
    all_own = context.watch_own()
    for start in range(0, n_tokens, rows):
        context.decode(TokenBatch.run(tokens[start : start + rows], start, n_sequences=1, logits="all"))
        found.append(context.logits().copy())
    assert all_own() == (OWN in model.layouts)
    context.close()
    return np.concatenate(found)


def test_the_number_of_rows_changes_no_bit(own: library.NativeLibrary, model_path: Path) -> None:
    with Model(model_path) as model:
        expected = logits(model, rows=_LENGTH)
        for rows in (1, 33, 64):
            assert np.array_equal(logits(model, rows=rows), expected), f"{rows} rows"


def test_neither_threads_nor_the_instruction_set_change_a_bit(
    own: library.NativeLibrary, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(short_path) as model:
        expected = logits(model, rows=16)
        for n_threads in (1, 3):
            assert np.array_equal(logits(model, rows=16, n_threads=n_threads), expected), (
                f"{n_threads} threads"
            )
    for name in own.instruction_sets():
        monkeypatch.setenv(VARIABLE, setting_for(name))
        with Model(short_path) as model:
            assert np.array_equal(logits(model, rows=16), expected), name


def test_the_head_of_a_model_that_drafts_is_packed_in_fewer_bits(
    own: library.NativeLibrary, smol_path: Path, tmp_path: Path
) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama", smol_path)  # in F16
    with Model(tiny) as whole, Model(tiny, drafts=True) as narrow:
        expected, found = logits(whole, rows=1), logits(narrow, rows=1)
        assert np.array_equal(logits(narrow, rows=33, n_threads=1), found)
    assert not np.array_equal(found, expected)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99


@pytest.mark.slow
def test_odd_matrices_of_a_stack_are_packed_where_they_were_read(
    own: library.NativeLibrary, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stacks have more bytes than are copied at a time, and the last panel of each matrix is not full.
    monkeypatch.setattr(tiny, "N_LAYER", 1)
    experts, rows = tiny.N_EXPERT, 8200
    mixture = tiny.MIXTURES["qwen3moe"]
    odd: dict[str, tuple[int, ...]] = {
        "ffn_gate_exps.weight": (experts, rows, tiny.N_EMBD),
        "ffn_up_exps.weight": (experts, rows, tiny.N_EMBD),
        "ffn_down_exps.weight": (experts, tiny.N_EMBD, rows),
    }

    def describe(writer: GGUFWriter) -> None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(tiny.N_EXPERT_USED)
        writer.add_expert_feed_forward_length(rows)

    kind = replace(mixture, layer=mixture.layer | odd, keys=describe)
    path = tiny.write_tiny(tmp_path / "odd.gguf", "qwen3moe", smol_path, kind=kind)
    with Model(path) as model:
        found = logits(model, rows=_LENGTH)
    monkeypatch.setitem(own._f, "edgespec_read_in_place", lambda _on: None)
    with Model(path) as model:
        assert np.array_equal(logits(model, rows=_LENGTH), found)


def test_they_compute_what_ggml_computes(
    own: library.NativeLibrary, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(model_path) as model:
        found = logits(model, rows=32, n_tokens=32)
    monkeypatch.setenv(VARIABLE, PLAIN)
    with Model(model_path) as model:
        expected = logits(model, rows=32, n_tokens=32)
    assert not np.array_equal(found, expected), "the same kernels computed both"
    both = np.stack([found, expected])
    both -= both.mean(axis=-1, keepdims=True)
    cosines = (both[0] * both[1]).sum(axis=-1) / np.prod(np.linalg.norm(both, axis=-1), axis=0)
    assert cosines.min() > 0.95


def test_streamed_weights_have_the_bits_of_resident_ones(
    own: library.NativeLibrary, model_path: Path, tmp_path: Path
) -> None:
    with Model(model_path) as model:
        resident = logits(model, rows=8)
    files = ModelFiles.of(read_header(model_path))
    needs, config = MemoryNeeds([Footprint(files.tensor_bytes, 0, 0)], 1 << 20), Config.of(slots=2)
    layout = StreamLayout.of(files, needs, 1 << 30, config, HitRates(), packed=True)
    plan = prepare_stream(files, layout, "always", tmp_path)
    with open_streamed_model(model_path, plan, ON_PROCESSOR, lambda *_: None) as model:
        assert isinstance(model.weights, StreamedWeights)
        assert set(model.weights.store.kernels.values()) == {OWN}
        assert np.array_equal(logits(model, rows=8), resident)
        assert np.array_equal(logits(model, rows=1), resident)


def test_one_copy_of_a_tied_embedding_serves_both_uses(own_layout: KernelLayout, smol_path: Path) -> None:
    files = ModelFiles.of(read_header(smol_path))
    (embedding,) = [t for t in files.headers[0].tensors if t.name == "token_embd.weight"]
    assert looks_up_rows(own_layout, embedding.type_id, embedding.shape)
    assert tied_bytes(files) == 0


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_experts(architecture: str, own: library.NativeLibrary, smol_path: Path, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", architecture, smol_path)
    quantized = make_drafter(tiny, tmp_path / "quantized.gguf", quantization="q4_0")
    with Model(quantized) as model:
        expected = logits(model, rows=48, n_tokens=48)
        for rows in (2, 7):  # the routers' products, with floats, are ggml's: a single row rounds differently
            assert np.array_equal(logits(model, rows=rows, n_tokens=48), expected), f"{rows} rows"


@pytest.mark.parametrize("shape", [(512, 37), (512, 37, 3), (8192, 4099)])
@pytest.mark.parametrize("type_id", [F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_NL])
def test_weights_are_packed_where_they_were_read_to(
    type_id: int, shape: tuple[int, ...], own: library.NativeLibrary, own_layout: KernelLayout
) -> None:
    f = ggml.functions()
    with ggml.ScratchContext() as scratch, own.loading(narrow_head=False) as pack_next:
        tensor = scratch.tensor(type_id, shape)
        n_bytes, size = f["ggml_nbytes"](tensor), own_layout.packed_bytes(type_id, shape)
        data = np.random.default_rng(type_id).bytes(n_bytes)
        buffer = f["ggml_backend_buft_alloc_buffer"](own_layout.address, size + 4096)
        base = f["ggml_backend_buffer_get_base"](buffer)
        f["ggml_backend_tensor_alloc"](buffer, tensor, base)
        ctypes.memset(base, 0, size)
        ctypes.memmove(base, data, n_bytes)
        assert [pack_next(), pack_next()] == [1, 0]
        found = ctypes.string_at(base, size)
        f["ggml_backend_buffer_free"](buffer)
    with own.loading(narrow_head=False) as pack_next:
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
        assert own_layout.pack(type_id, shape, address, n_bytes) == found
        assert pack_next() == 0, "what was set from a copy is packed"


@pytest.mark.parametrize("type_id", [Q4_0, Q8_0, Q4_K])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_products_with_chosen_matrices(type_id: int, n_threads: int, own_layout: KernelLayout) -> None:
    rng = np.random.default_rng(0)
    shape = (512, 72, 5)
    data = b"".join(
        products.quantized(type_id, rng.standard_normal((72, 512), dtype=np.float32)) or b"" for _ in range(5)
    )
    activations = rng.standard_normal((40, 512), dtype=np.float32)
    found = {}
    with products.Processor(n_threads) as processor:
        for layout in (None, own_layout):
            with products.Product(processor, type_id, shape, data, layout, activations) as made:
                made.compute()
                found[layout] = made.result()
    assert np.mean((found[own_layout] - found[None]) ** 2) < 5e-4 * np.mean(found[None] ** 2)


def test_in_memory_decoding_is_exact_by_itself(own: library.NativeLibrary, short_path: Path) -> None:
    with Model(short_path) as model:
        context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=2, n_threads=2)
        assert find_row_rule(context, FREE) == ANY_ROWS
        context.close()
    with edgespec.load(short_path, draft="none") as engine:
        assert engine.target.rule == ANY_ROWS
        expected = answer(engine)
    with edgespec.load(short_path, draft=short_path, tree_budget=40) as engine:
        assert answer(engine) == expected
    with edgespec.load(short_path, draft="none", exact=False) as engine:
        assert engine.target.rule is None


@pytest.mark.slow
def test_trees_of_any_size_give_the_text_of_plain_decoding(
    own: library.NativeLibrary, smol_path: Path, dropped_drafter_path: Path
) -> None:
    config = GenerationConfig(max_tokens=12, temperature=0.9, seed=5)
    with edgespec.load(smol_path, draft="none", exact=True, context=512) as engine:
        expected = engine.generate(PROMPT, config, raw=True)
        saved = engine.target.cache.save(0, engine.target.cache.length)
    with edgespec.load(
        smol_path, draft=dropped_drafter_path, tree_budget=128, exact=True, context=512
    ) as engine:
        engine.speculator.decisions = Decisions(drafting=True)
        answer = engine.generate(PROMPT, config, raw=True)
        assert engine.target.max_nodes >= 128
        assert max(record.nodes for record in answer.passes) > 64
        assert answer.tokens == expected.tokens
        cache = engine.target.cache
        state = bytes(cache.save(0, cache.length))
        # A state names the sequence that it was saved from, whose number depends on how many there are.
        length = cache.length
        engine.target.rewind(0)
        cache.restore(saved, length)
        assert bytes(cache.save(0, length)) == state


def test_prompts_are_read_in_the_largest_pieces_and_have_the_same_bits(
    own: library.NativeLibrary, short_path: Path
) -> None:
    tokens = np.random.default_rng(0).integers(1000, 8000, 700).tolist()
    with edgespec.load(short_path, draft="none", exact=True, context=1024) as engine:
        target = engine.target
        assert target.prompt_rows == target.context.n_rows > 64
        pieces: list[int] = []
        sequence = TextSequence(tokens)
        target.prefill(sequence, len(tokens), on_progress=lambda read, _: pieces.append(read))
        assert len(pieces) == 1 + -(-len(tokens) // target.prompt_rows)
        whole = bytes(target.cache.save(0, len(tokens)))
        target.rewind(0)
        for end in range(50, len(tokens) + 1, 50):
            target.prefill(TextSequence(tokens[:end]), end)
        assert bytes(target.cache.save(0, len(tokens))) == whole


@pytest.mark.parametrize("n_texts", [16, 48])
def test_many_texts_in_a_streamed_pass_are_those_of_each_alone(
    n_texts: int, own: library.NativeLibrary, short_path: Path
) -> None:
    prompts = [f"{PROMPT} there were {n} ships," for n in range(n_texts)]
    config = GenerationConfig(max_tokens=6)
    with load_streamed(short_path, context=256, parallel=n_texts, text_tokens=32) as engine:
        assert engine.target.rule == ANY_ROWS
        together = [
            answer.tokens for answer in engine.generate_many(prompts, config, raw=True, parallel=n_texts)
        ]
        alone = [engine.generate(prompts[n], config, raw=True).tokens for n in (0, n_texts - 1)]
    assert [together[0], together[-1]] == alone


@pytest.mark.slow
def test_more_texts_than_a_padded_pass_has_rows_share_one(
    own: library.NativeLibrary, short_path: Path
) -> None:
    prompts = [f"{n}, {n + 1}," for n in range(80)]
    config = GenerationConfig(max_tokens=24)
    with edgespec.load(short_path, draft="none", context=256, parallel=80, text_tokens=64) as engine:
        rows: list[int] = []
        verify = engine.target.verify

        def counted(trees: Sequence[SequenceTree], *others: Any) -> TargetPass:
            rows.append(len(trees))
            return verify(trees, *others)

        engine.target.verify = counted  # type: ignore[method-assign]
        answers = list(engine.generate_many(prompts, config, raw=True, parallel=80))
        assert max(rows) > 64
        for n in (0, 79):
            assert answers[n].tokens == engine.generate(prompts[n], config, raw=True).tokens


@pytest.mark.slow
def test_first_layers_show_the_rule_of_a_streamed_model(own: library.NativeLibrary, gemma_path: Path) -> None:
    with load_in_least_memory(gemma_path, context=256) as engine:
        context, files = engine.target.context, ModelFiles.of(read_header(gemma_path))
        first = FirstLayers(context, files)
        assert find_row_rule(context, FREE_SPARING, first) == ANY_ROWS
        assert set(first.seconds) >= set(FEW_PASSES)
        assert all(seconds > 0 for seconds in first.seconds.values())
        assert find_row_rule(context, FREE_SPARING) == engine.target.rule == ANY_ROWS


def test_first_layers_compute_what_whole_passes_do(own: library.NativeLibrary, gemma_path: Path) -> None:
    with load_in_least_memory(gemma_path, context=256) as engine:
        context, files = engine.target.context, ModelFiles.of(read_header(gemma_path))
        n_first = layers_of_each_kind(files.layers())
        assert 1 < n_first < len(files.layers())
        found = FirstLayers(context, files).decode(5)
        assert found is not None
        tap = LayerTap([n_first], found.shape[1])
        context.graph.add(tap)
        context.decode(TokenBatch.run(np.arange(5, dtype=np.int32), 0, n_sequences=1, logits="all"))
        assert np.array_equal(found, tap.rows())


@pytest.mark.slow
def test_first_layers_show_nothing_of_kernels_that_round_by_rows(
    own: library.NativeLibrary, gemma_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, PLAIN)
    with load_in_least_memory(gemma_path, context=256) as engine:
        first = FirstLayers(engine.target.context, ModelFiles.of(read_header(gemma_path)))
        assert find_row_rule(engine.target.context, FREE_SPARING, first) is None


def test_attention_of_ggml_is_not_taken_for_own(
    own: library.NativeLibrary, smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, PLAIN)
    with Model(smol_path) as model:
        context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=2, n_threads=2)
        assert find_row_rule(context, FREE) is None
        context.close()


def test_a_mixture_with_a_float_router_is_exact_with_single_rows(
    own: library.NativeLibrary, smol_path: Path, tmp_path: Path
) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "qwen3moe", smol_path)
    quantized = make_drafter(tiny, tmp_path / "quantized.gguf", quantization="q4_0")
    routers = [t for t in read_header(quantized).tensors if "ffn_gate_inp" in t.name]
    assert routers
    assert all(router.type_id == ggml.F32 for router in routers)
    with Model(quantized) as model:
        context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=2, n_threads=2)
        assert find_row_rule(context, FREE) == ANY_ROWS
        context.close()


@pytest.mark.parametrize("kept_as", [ggml.F16, Q8_0], ids=["F16", "Q8_0"])
@pytest.mark.parametrize("group", [1, 2, 6, 7, 16])
@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_attention_to_any_number_of_cells_by_any_number_of_rows(
    own: library.NativeLibrary, kept_as: int, group: int, cap: float
) -> None:
    """The numbers of queries that share keys are those for which vectors hold queries, and cells."""
    for cells in (1, 31, 33, 200):
        attention = Attention(64, 2 * group, 2, cells, cap, kept_as)
        with Processor(3) as processor:
            expected = attention.compute(processor, cells, None)
            found = attention.compute(processor, cells, own)
            assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
            for rows in (1, 2, 17):
                few = attention.compute(processor, min(rows, cells), own)
                assert np.array_equal(few, found[: len(few)]), f"{rows} rows, {cells} cells"


def answer(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.generate(PROMPT, CONFIG, raw=True).tokens)


# Where they cannot be used


@pytest.fixture
def program(at_a_desk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs edgespec in an environment that is spoiled, and returns what it prints."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def run(spoiled: str, *arguments: str) -> str:
        sabotage(tmp_path, spoiled, untried=True)
        run = [sys.executable, "-m", "edgespec", *arguments]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


_ASK = ("generate", "-p", "Hello", "--max-tokens", "4", "--draft", "none")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_plug_that_crashes_is_left_out(own: library.NativeLibrary, program: Callable[..., str]) -> None:
    said = program(SABOTAGE, *_ASK, "--verbose")
    assert "EdgeSpec's own kernels are not used: trying them, llama.cpp crashed" in said
    assert "plugging them in" in said
    examined = program(SABOTAGE, "doctor", "--no-disk-check")
    assert "EdgeSpec's own kernels are not used" in examined


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose C++ compiler does not exist; what is noted about it is noted in a folder of its own."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
def test_without_a_library_ggml_serves_and_the_doctor_says_what_to_do(program: Callable[..., str]) -> None:
    said = " ".join(program(NOT_COMPILED, *_ASK).split())
    assert "EdgeSpec's own kernels are not used: CXX names no-such-compiler" in said
    assert "take 2 to 4 times as long" in said
    assert "Install a C++ compiler" in said
    said = program(NOT_COMPILED, *_ASK, "--offload", "stream", "--memory", "300MiB")
    assert "Weights cannot be streamed here: EdgeSpec's own library was not compiled" in said
    examined = " ".join(program(NOT_COMPILED, "doctor", "--no-disk-check").split())
    assert "take 2 to 4 times as long" in examined
    assert "-m edgespec.kernels.native.build" in examined


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
def test_asking_for_kernels_that_are_not_there_is_an_error(
    program: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "edgespec")
    said = program(NOT_COMPILED, *_ASK)
    assert "EDGESPEC_KERNELS is 'edgespec', and EdgeSpec's own kernels cannot be used here" in said
