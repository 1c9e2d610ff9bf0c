"""Layers for multi-token prediction are set apart from a model's own, and the files that lack them say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import Config
from edgespec.errors import ModelFileError, PairingError, UsageError
from edgespec.heads.families import head_of
from edgespec.heads.mtp import MTPHead, mtp_fault, read_mtp_file, require_mtp
from edgespec.llama.runtime.device_layers import ON_PROCESSOR
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.types import GGUFHeader, TensorInfo
from edgespec.planning.files import read_mtp

WIDTH, LAYERS = 256, 4


def header(architecture: str = "qwen35", *, count: int = 1, held: bool = True, **more: Any) -> GGUFHeader:
    """A model of a few layers, and `count` for further tokens, whose tensors are in the file if `held`."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (WIDTH, 512), "output.weight": (WIDTH, 512)}
    for layer in range(LAYERS + (count if held else 0)):
        shapes[f"blk.{layer}.attn_q.weight"] = (WIDTH, WIDTH)
        if layer >= LAYERS:
            shapes[f"blk.{layer}.nextn.eh_proj.weight"] = (2 * WIDTH, WIDTH)
    tensors = tuple(TensorInfo(name, shape, 1, 0, 2 * shape[0] * shape[1]) for name, shape in shapes.items())
    settings = {
        "block_count": LAYERS + count,
        "nextn_predict_layers": count,
        "embedding_length": WIDTH,
        "ssm.state_size": 16,
        "full_attention_interval": 4,
        **more,
    }
    metadata = {f"{architecture}.{key}": value for key, value in settings.items()}
    metadata["general.architecture"] = architecture
    return GGUFHeader(Path("m.gguf"), 3, metadata, tensors, 32, 0, 0, "f" * 32)


@pytest.mark.parametrize("count", [1, 3])
def test_layers_are_set_apart(count: int) -> None:
    whole = header(count=count)
    files = ModelFiles.of_headers([whole])
    assert files.headers[0].block_count == LAYERS == len(files.layers())
    assert isinstance(files.mtp, MTPLayers)
    assert files.mtp.n_layers == files.mtp.headers[0].block_count == count
    assert MTPHead(files.mtp).shown_width == WIDTH
    assert [layer.index for layer in files.mtp.layers()] == list(range(LAYERS, LAYERS + count))
    assert files.tensor_bytes + files.mtp.tensor_bytes == whole.tensor_bytes
    assert files.headers[0].fingerprint == whole.fingerprint != files.mtp.headers[0].fingerprint
    assert files.headers[0].keeps_running_state
    assert not files.mtp.headers[0].keeps_running_state
    assert ModelFiles.of_headers(files.headers) == ModelFiles(files.headers), "only once"
    assert head_of(files.mtp) == MTPHead(files.mtp)
    assert head_of(files) is None
    assert head_family(whole) is None


def test_later_files_of_a_split_model_may_hold_them() -> None:
    whole = header()
    at = len(whole.tensors) - 2
    first, second = (
        replace(whole, tensors=whole.tensors[:at]),
        replace(whole, metadata={}, tensors=whole.tensors[at:]),
    )
    files = ModelFiles.of_headers([first, second])
    assert files.mtp is not None
    assert files.headers[1].tensors == ()
    assert files.mtp.headers[1].tensors == second.tensors


def test_steps_multiply_by_the_output_too() -> None:
    files = ModelFiles.of_headers([header()])
    layers = require_mtp(files)
    multiplied = MTPHead(layers).multiplied(layers, files)
    assert "output.weight" in [tensor.name for tensor in multiplied.headers[0].tensors]


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (header(count=0), "it has no layer for multi-token prediction (MTP)"),
        (header(held=False), "declares an MTP layer, but the file lacks the layer's weights"),
        (header("deepseek4"), "cannot compute MTP layers of the architecture deepseek4"),
        (header(count=2), "it has 2 MTP layers, and llama.cpp computes one of the architecture qwen35 only"),
        (header("step35", count=3), ""),
        (header(), ""),
    ],
)
def test_faults_are_named(made: GGUFHeader, fault: str) -> None:
    files = ModelFiles.of_headers([made])
    assert fault in mtp_fault(files)
    assert bool(mtp_fault(files)) == bool(fault)
    if fault:
        with pytest.raises(UsageError, match=r"m\.gguf cannot draft for itself") as caught:
            require_mtp(files)
        assert "draft='mtp'" in caught.value.hint
    # Where the weights are missing, or mean something else, all layers are the model's own.
    if files.mtp is None:
        assert files.headers == (made,)


def test_layers_of_a_model_that_is_not_here_are_planned_for() -> None:
    """Nothing can be tried with them."""
    files = ModelFiles.of_headers([header()])
    assert read_mtp(files) is files.mtp


def alone(**more: Any) -> GGUFHeader:
    """The file of a model's MTP layer: its other layers are left out."""
    whole = header(**more)
    kept = tuple(t for t in whole.tensors if not t.name.startswith(("blk.0", "blk.1", "blk.2", "blk.3")))
    return replace(whole, tensors=kept)


def test_layers_in_a_file_of_their_own() -> None:
    layers = read_mtp_file([alone()])
    assert head_family(alone()) is HeadFamily.MTP
    assert (layers.n_layers, layers.n_before) == (1, LAYERS)
    assert MTPHead(layers).shown_width == WIDTH
    assert layers.headers[0].block_count == 1
    assert not layers.headers[0].keeps_running_state
    assert "output.weight" in [tensor.name for tensor in layers.headers[0].tensors]
    assert head_of(layers) == MTPHead(layers)
    for other in (header(), header(held=False), header(count=0)):
        assert head_family(other) is None
    with pytest.raises(ModelFileError, match="cannot compute MTP layers of the architecture deepseek4"):
        read_mtp_file([alone(architecture="deepseek4")])


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (header("qwen3next"), "its architecture is qwen35, not qwen3next"),
        (header(embedding_length=320), "it reads states of 256 elements, not 320"),
        (header(block_count=LAYERS + 2), "it follows 4 layers, but there are 5"),
        (header(), ""),
        (header(count=0), ""),
        (header(held=False), ""),
    ],
)
def test_the_model_of_layers_in_a_file_of_their_own(target: GGUFHeader, fault: str) -> None:
    layers = read_mtp_file([alone()])
    if not fault:
        MTPHead(layers).require_fit(ModelFiles.of_headers([target]))
        return
    with pytest.raises(PairingError, match="was made for another target") as caught:
        MTPHead(layers).require_fit(ModelFiles.of_headers([target]))
    assert fault in caught.value.what


def test_the_option_names_no_model() -> None:
    speculation = Config.of(draft="mtp").speculation
    assert speculation.drafts
    assert speculation.uses_mtp
    assert not speculation.names_a_model
    for kind in (None, "model", "merged"):
        Config.of(draft="mtp", drafter=kind).speculation.check_drafter()
    with pytest.raises(UsageError, match="exclude each other"):
        Config.of(draft="mtp", drafter="lookup").speculation.check_drafter()


def test_without_devices_nothing_is_placed() -> None:
    class Params:
        devices = n_gpu_layers = tensor_split = None

    params = Params()
    here, _ = ON_PROCESSOR.amend(params, range(LAYERS, LAYERS + 1))
    assert here == []
    assert params.n_gpu_layers == 0
