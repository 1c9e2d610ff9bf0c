"""Devices that failed while they computed: which error it is, and what later loads ask of devices."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import Config
from edgespec.errors import DeviceLostError, DeviceMemoryError
from edgespec.kernels import ggml
from edgespec.kernels.native.guard import CallFailed, call_guard
from edgespec.llama.runtime import device_failures
from edgespec.llama.runtime.backend import LogLines
from edgespec.loading import load
from edgespec.loading.load import with_devices_left

CUDA_SAYS = "/src/ggml-cuda/ggml-cuda.cu:98: CUDA error"


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_failures, "_lost", set())
    monkeypatch.setattr(device_failures, "_shortages", 0)


def error(said: str, *logged: str) -> Any:
    """The error of the only device that each build has."""
    return device_failures.device_error([ggml.cpu_device()], said, LogLines(errors=list(logged)))


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        (CUDA_SAYS, ["CUDA error: out of memory"]),
        ("vk::Device::allocateMemory: ErrorOutOfDeviceMemory", []),
        ("vk::Device::allocateMemory: ErrorOutOfHostMemory", []),
        ("std::bad_alloc", []),
    ],
)
def test_too_little_memory_is_told_from_other_failures(said: str, logged: list[str]) -> None:
    found = error(said, *logged)
    assert isinstance(found, DeviceMemoryError)
    assert str(found).startswith(f"CPU ran out of memory while it computed: {(logged or [said])[0]}. Close")
    assert device_failures.shortages() == 1
    assert not device_failures.lost_devices()


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        (CUDA_SAYS, ["CUDA error: an illegal memory access was encountered"]),
        ("vk::Queue::submit: ErrorDeviceLost", []),
    ],
)
def test_a_device_that_fails_otherwise_is_lost(said: str, logged: list[str]) -> None:
    found = error(said, *logged)
    assert isinstance(found, DeviceLostError)
    assert str(found).startswith(f"CPU failed while it computed: {(logged or [said])[0]}. Continue without")
    assert device_failures.lost_devices() == {"CPU"}
    assert device_failures.shortages() == 0


def test_what_is_on_a_device_is_left_alone_if_that_was_lost_since() -> None:
    before = device_failures.LossWatch([ggml.cpu_device()])
    assert not before.lost
    error("vk::Queue::submit: ErrorDeviceLost")
    assert before.lost
    assert not device_failures.LossWatch([ggml.cpu_device()]).lost  # it has come back
    assert not device_failures.LossWatch([]).lost


def test_after_a_shortage_only_drafters_that_were_placed_stay_on_cards() -> None:
    error("out of memory")
    assert with_devices_left(Config.of(model="m")).devices.draft_device == "none"
    placed = Config.of(model="m", draft_device="CUDA0", gpu_layers=3)
    assert with_devices_left(placed) == placed


@pytest.mark.parametrize(
    ("options", "others", "left"),
    [
        ({}, ["CUDA1"], ((), "auto", "auto")),
        ({}, [], ((), 0, "none")),
        ({"gpu_layers": "all"}, [], ((), 0, "none")),
        ({"gpu_layers": 7}, ["CUDA1"], ((), 7, "auto")),
        ({"device": ("CPU",), "gpu_layers": 7}, ["CUDA1"], ((), 0, "none")),
        ({"device": ("CPU", "CUDA1"), "gpu_layers": 7}, ["CUDA1"], (("CUDA1",), 7, "auto")),
        ({"draft_device": "CPU"}, ["CUDA1"], ((), "auto", "none")),
    ],
)
def test_a_lost_device_is_not_asked_for_again(
    options: dict[str, Any], others: list[str], left: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    error("vk::Queue::submit: ErrorDeviceLost")
    monkeypatch.setattr(load, "current_build", lambda: SimpleNamespace(gpus=others))
    found = with_devices_left(Config.of(model="m", **options)).devices
    assert (found.names, found.gpu_layers, found.draft_device) == left


def test_what_ends_the_process_is_an_error_in_a_guarded_call() -> None:
    guard = call_guard()
    if guard is None:
        pytest.skip("EdgeSpec's library was not compiled")
    f = ggml.functions()
    for _ in range(2):
        with pytest.raises(CallFailed, match="GGML_ASSERT"):
            guard.context(f["ggml_backend_dev_get"], ggml.cpu_device())  # a number as large as an address
    assert guard.context(f["ggml_backend_dev_name"], ggml.cpu_device())


def test_a_device_that_fails_in_a_transfer_is_an_error_once_there_is_a_guard() -> None:
    if call_guard() is None:
        pytest.skip("EdgeSpec's library was not compiled")
    f = ggml.functions()
    with ggml.ScratchContext() as scratch:
        tensor, data = scratch.tensor(ggml.F32, (4,)), (ctypes.c_float * 4)()
        buffer = f["ggml_backend_buft_alloc_buffer"](ggml.plain_buffer_type(), 64)
        f["ggml_backend_tensor_alloc"](buffer, tensor, f["ggml_backend_buffer_get_base"](buffer))
        for transfer in (f["ggml_backend_tensor_get"], f["ggml_backend_tensor_set"]):
            transfer(tensor, ctypes.addressof(data), 0, 16)
            with pytest.raises(CallFailed, match="out of bounds"):
                transfer(tensor, ctypes.addressof(data), 8, 16)
        f["ggml_backend_buffer_free"](buffer)
