"""Kernel layouts: what EDGESPEC_KERNELS allows, and what llama.cpp is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.errors import UsageError
from edgespec.kernels import ggml
from edgespec.kernels.layouts import (
    ModelKernels,
    available_layouts,
    kernel_layout,
    kernel_layouts,
    kernels_identity,
    weight_layout,
)
from edgespec.kernels.setting import PLAIN, SETTINGS, VARIABLE, allowed_layouts
from edgespec.llama.cache.states import cache_identity
from edgespec.llama.row_rule import THOROUGH, RowRuleStore
from edgespec.llama.runtime.backend import build_identity, start_backend
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing.pack import pack_path

Q4_0 = 2


@pytest.fixture
def loader() -> Iterator[None]:
    """Leaves llama.cpp's loader as it was."""
    start_backend()
    offered = ggml.offered_buffer_types()
    yield
    ggml.offer_buffer_types(offered)


@pytest.fixture(params=[s for s in SETTINGS if s not in ("auto", "plain")])
def layout_setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each setting that names a layout of this processor."""
    monkeypatch.setenv(VARIABLE, request.param)
    try:
        kernel_layouts()
    except UsageError:
        pytest.skip(f"this processor has no {request.param} kernels")
    return str(request.param)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", ("EDGESPEC", "CPU_REPACK")),
        ("", ("EDGESPEC", "CPU_REPACK")),
        ("plain", ()),
        ("repack", ("CPU_REPACK",)),
        (" EdgeSpec ", ("EDGESPEC",)),
    ],
)
def test_a_setting_leaves_layouts_out(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    assert allowed_layouts(["EDGESPEC", "CPU_REPACK"]) == expected


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(
        UsageError, match=r"EDGESPEC_KERNELS must be one of plain, repack, edgespec, auto, not 'fast'"
    ):
        allowed_layouts([])


@pytest.mark.parametrize(
    ("available", "has"), [(["EDGESPEC"], "it has EDGESPEC"), ([], "none but the plain one")]
)
def test_a_layout_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, available: list[str], has: str
) -> None:
    monkeypatch.setenv(VARIABLE, "repack")
    with pytest.raises(UsageError, match=f"no CPU_REPACK kernels on this processor: .*{has}"):
        allowed_layouts(available)


def test_plain_has_no_layouts(monkeypatch: pytest.MonkeyPatch, loader: None) -> None:
    monkeypatch.setenv(VARIABLE, "plain")
    assert kernel_layouts() == ()
    assert kernel_layout(Q4_0, (256, 64)) is None
    assert ModelKernels.chosen() == ModelKernels()
    assert kernels_identity() == "plain"


def test_llama_cpp_is_offered_the_layout_alone(layout_setting: str, loader: None, smol_path: Path) -> None:
    Model(smol_path).close()
    assert ggml.offered_buffer_types() == tuple(layout.address for layout in kernel_layouts())
    assert len(kernel_layouts()) == 1
    assert len(available_layouts()) >= 1, "what is there must still be known"


def test_a_restriction_can_be_lifted(loader: None) -> None:
    everything = ggml.extra_buffer_types()
    ggml.offer_buffer_types([])
    assert ggml.offered_buffer_types() == ()
    ggml.offer_buffer_types(everything)
    assert ggml.offered_buffer_types() == everything


def test_what_is_kept_is_kept_apart(
    layout_setting: str, monkeypatch: pytest.MonkeyPatch, smol_path: Path, tmp_path: Path
) -> None:
    header = read_header(smol_path)

    def names() -> list[str]:
        with Model(smol_path, vocabulary_only=True) as model:
            identity = cache_identity(header, model)
        return [
            build_identity(),
            identity["build"],
            str(RowRuleStore(tmp_path).path(header.fingerprint, "packed", THOROUGH)),
            str(pack_path(tmp_path, ModelFiles.of(header))),
        ]

    with_layout = names()
    monkeypatch.setenv(VARIABLE, "plain")
    assert all(a != b for a, b in zip(with_layout, names(), strict=True))


def test_of_stacks_only_experts_are_rearranged() -> None:
    shape = (512, 64, 4)
    assert weight_layout("blk.0.attn_k_b.weight", Q4_0, shape) is None
    for name in ("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_up_exps.weight"):
        assert weight_layout(name, Q4_0, shape) == kernel_layout(Q4_0, shape)
    assert weight_layout("blk.0.attn_k.weight", Q4_0, shape[:2]) == kernel_layout(Q4_0, shape[:2])


def test_own_kernels_are_among_the_layouts_once_the_backend_has_started() -> None:
    """llama.cpp reads the list once, so what is added later would not be found."""
    program = (
        "from edgespec.kernels import ggml\n"
        "from edgespec.kernels.native import library\n"
        "from edgespec.llama.runtime.backend import start_backend\n"
        "start_backend()\n"
        "ggml.offer_buffer_types(ggml.extra_buffer_types())\n"
        "found = ggml.offered_buffer_types()\n"
        "own = library.loaded()\n"
        "print(own is None or own.buffer_type == found[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_other_code_may_load_models_while_the_own_kernels_are_not_in_use(smol_path: Path) -> None:
    program = (
        "import llama_cpp\n"
        "from edgespec.llama.runtime.backend import start_backend\n"
        "start_backend()\n"
        "params = llama_cpp.llama_model_default_params()\n"
        "params.use_extra_bufts = True\n"
        f"assert llama_cpp.llama_model_load_from_file({os.fsencode(smol_path)!r}, params)\n"
    )
    environment = {**os.environ, VARIABLE: PLAIN}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done
