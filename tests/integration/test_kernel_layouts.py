"""Kernel layouts from end to end: faulty ones are left out, and a choice holds for every way of loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates
from edgespec.errors import UsageError
from edgespec.kernels import report_store
from edgespec.kernels.layouts import kernel_layout, kernel_layouts, kernels_identity
from edgespec.kernels.products import quantized
from edgespec.kernels.report import TrialReport
from edgespec.kernels.setting import PLAIN, VARIABLE, kernels_of
from edgespec.kernels.trial import run_trial
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.device_layers import ON_PROCESSOR
from edgespec.llama.runtime.layout_overrides import layout_overrides, output_override
from edgespec.llama.runtime.model import Model
from edgespec.loading.streamed_model import open_streamed_model, prepare_stream
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.planning.memory.stream_layout import StreamLayout
from edgespec.processes import children
from tests.sabotage import SABOTAGED_BOOT, sabotage
from tests.tiny import write_tiny
from tests.tiny_hybrid import write_tiny_hybrid

# Spoils one layout in the process that tries them.
SABOTAGE = """
import os, signal, sys
if "edgespec.kernels.trial_worker" in sys.orig_argv:
    from edgespec.kernels import products

    class Spoiled(products.Product):
        def __init__(self, processor, type_id, shape, data, layout, activations):
            super().__init__(processor, type_id, shape, data, layout, activations)
            ours = layout is not None and layout.name == {layout!r}
            self.spoiled = ours and activations.ndim == {dimensions}

        def compute(self):
            if self.spoiled and {fate!r} != "nonsense":
                os.kill(os.getpid(), getattr(signal, {fate!r}))
            return super().compute()

        def result(self):
            values = super().result()
            if self.spoiled:
                values[0, 0] = float("nan")
            return values

    products.Product = Spoiled
"""

Q4_0 = 2  # the id of the type

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """As people have it, whatever layouts the suite runs with."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def first_layout(auto: None) -> str:
    """The layout that ggml would take first."""
    start_backend()
    if not kernel_layouts():
        pytest.skip("this processor has no kernel layouts")
    return kernel_layouts()[0].name


@pytest.fixture
def program(at_a_desk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs edgespec, with a layout that the trial finds to be faulty."""
    folder = tmp_path / "sabotage"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def run(layout: str, fate: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        sabotage(folder, SABOTAGE.format(layout=layout, fate=fate, dimensions=2), untried=True)
        return subprocess.run(
            [sys.executable, "-m", "edgespec", *arguments], capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("fate", "words"), [("SIGILL", "crashed (illegal instruction)"), ("nonsense", "compute nonsense")]
)
def test_a_faulty_layout_is_left_out_and_the_program_answers(
    fate: str, words: str, first_layout: str, program: Program, tmp_path: Path
) -> None:
    ask = ("generate", "-p", "The capital of France is", "--max-tokens", "4", "--verbose")
    done = program(first_layout, fate, *ask)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert f"{kernels_of(first_layout)} are not used" in done.stderr
    (file,) = (tmp_path / "sabotage" / "reports").glob("*.json")
    assert words in json.loads(file.read_text())["problems"][first_layout]
    written = file.stat().st_mtime_ns
    examined = json.loads(program(first_layout, fate, "doctor", "--json", "--no-disk-check").stdout)
    (layout,) = [x for x in examined["kernels"]["layouts"] if x["name"] == first_layout]
    assert not layout["used"]
    assert words in layout["problem"]
    assert [f["severity"] for f in examined["findings"] if kernels_of(first_layout) in f["what"]] == [
        "warning"
    ]
    assert file.stat().st_mtime_ns == written, "it was tried again"


def test_llama_cpp_that_does_not_work_ends_in_a_message(auto: None, program: Program, tmp_path: Path) -> None:
    crash = "import os, sys\nif 'edgespec.kernels.trial_worker' in sys.orig_argv: os.abort()"
    sabotage(tmp_path / "sabotage", crash, untried=True)
    run = [sys.executable, "-m", "edgespec", "generate", "-p", "Hello"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "does not work on this processor" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_crash_of_the_program_itself_prints_where_it_was(program: Program, tmp_path: Path) -> None:
    crash = (
        "import ctypes, sys\nif 'generate' in sys.orig_argv:\n"
        "    import edgespec.llama.runtime.context as context\n"
        "    context.Context.decode = lambda *_: ctypes.string_at(0)\n"
    )
    run = [sys.executable, "-m", "edgespec", "generate", "-p", "Hello", "--draft", "none"]
    sabotage(tmp_path / "sabotage", crash)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "most recent call first" in done.stderr


# Several sequences of models with a running state


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """Tiny, in a quantization that most processors have a layout for."""
    start_backend()
    return write_tiny_hybrid(tmp_path / "hybrid.gguf", Q4_0, partial(quantized, Q4_0))


def logits_of(path: Path, n_sequences: int, **options: Any) -> np.ndarray[Any, Any]:
    """Logits of a text in each of some sequences, which share a pass."""
    with Model(path, **options) as model:
        context = Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=n_sequences, n_threads=1)
        texts = np.random.default_rng(0).integers(3, model.vocabulary.n_tokens, (n_sequences, 8))
        rows = [
            TokenBatch.run(text, 0, 1, "all").with_sequences(np.full(8, number, dtype=np.int32))
            for number, text in enumerate(texts.astype(np.int32))
        ]
        context.decode(TokenBatch.joined(rows))
        return context.logits().copy()


@pytest.mark.slow
def test_what_is_used_with_several_sequences_is_right(auto: None, hybrid: Path) -> None:
    found, plain = logits_of(hybrid, 3), logits_of(hybrid, 3, repack=False)
    assert np.abs(found - plain).max() < 0.2 * np.abs(plain).max()


@pytest.mark.slow
def test_a_layout_that_is_wrong_with_several_sequences_is_found(
    first_layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(tmp_path, SABOTAGE.format(layout=first_layout, fate="nonsense", dimensions=3))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(children, "_BOOT", SABOTAGED_BOOT)
    report = run_trial()
    assert "of several sequences" in report.problems[first_layout]


# What was measured decides, for models in memory and for streamed ones


@pytest.fixture
def plain_is_faster(first_layout: str, q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """A report by which some quantizations of the model are faster without the first layout."""
    types = {
        tensor.type_id
        for layer in ModelFiles.of(read_header(q4_drafter_path)).layers()
        for tensor in layer.tensors
        if kernel_layout(tensor.type_id, tensor.shape) is not None
    }
    if not types:
        pytest.skip("no layout here can hold this model's weights")
    by_layout = {first_layout: (2.0, 2.0, 2.0), PLAIN: (1.0, 1.0, 1.0)}
    monkeypatch.setattr(report_store, "_found", TrialReport(seconds=dict.fromkeys(types, by_layout)))
    return types


def logits(model: Model) -> np.ndarray:
    context = Context(model, n_cells=256, n_rows=32, n_outputs=32, n_sequences=1, n_threads=2)
    found = []
    for start, rows in ((0, 32), (32, 8), (40, 1)):
        context.decode(TokenBatch.run(range(100 + start, 100 + start + rows), start, 1, logits="all"))
        found.append(context.logits().copy())
    context.close()
    return np.concatenate(found)


def test_resident_and_streamed_weights_follow_the_measurement(
    plain_is_faster: set[int], q4_drafter_path: Path, tmp_path: Path
) -> None:
    assert all(f"{type_id}=plain" in kernels_identity() for type_id in plain_is_faster)
    assert layout_overrides(q4_drafter_path, 0, kernel_layouts())
    files = ModelFiles.of(read_header(q4_drafter_path))
    matrices = [tensor for layer in files.layers() for tensor in layer.tensors]
    assert all(kernel_layout(t.type_id, t.shape) is None for t in matrices if t.type_id in plain_is_faster)
    with Model(q4_drafter_path) as model:
        resident = logits(model)
    needs, config = MemoryNeeds([Footprint(files.tensor_bytes, 0, 0)], 1 << 20), Config.of(slots=2)
    layout = StreamLayout.of(files, needs, 1 << 30, config, HitRates(), packed=True)
    plan = prepare_stream(files, layout, "always", tmp_path)
    with open_streamed_model(q4_drafter_path, plan, ON_PROCESSOR, lambda *_: None) as model:
        assert np.array_equal(logits(model), resident)


def test_nothing_is_directed_where_ggml_does_as_measured(
    first_layout: str, q4_drafter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_store, "_found", TrialReport())
    assert layout_overrides(q4_drafter_path, 0, kernel_layouts()) == []


def test_layers_of_a_gpu_are_left_to_llama_cpp(plain_is_faster: set[int], q4_drafter_path: Path) -> None:
    some, none = (layout_overrides(q4_drafter_path, n, kernel_layouts()) for n in (10, 999))
    layers = read_header(q4_drafter_path).block_count
    assert layers is not None
    assert none == []
    assert any("(0|" in pattern for pattern, _ in some)
    assert not any(f"|{layers - 1})" in pattern or r"output\.weight$" in pattern for pattern, _ in some)


def test_the_output_alone_is_rearranged_where_other_weights_are_sent(smol_path: Path, tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", "llama", smol_path)
    path = make_drafter(plain, tmp_path / "untied.gguf", quantization="q4_0")
    (output,) = (t for t in read_header(path).tensors if t.name == "output.weight")
    layout = kernel_layout(output.type_id, output.shape)
    expected = [] if layout is None else [(r"^output\.weight$", layout.address)]
    assert output_override(path, kernel_layouts()) == expected
    assert output_override(path, ()) == []


def test_layers_for_a_gpu_that_is_not_there_are_refused(smol_path: Path) -> None:
    import edgespec
    from edgespec.llama.build import current_build

    if current_build().gpus:
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"Cannot use a GPU: this llama\.cpp build"):
        edgespec.load(smol_path, draft="none", gpu_layers=4)
