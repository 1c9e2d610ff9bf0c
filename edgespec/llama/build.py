"""The llama.cpp build in use: what it was compiled for, and the devices it can compute on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from edgespec.base.prebuilt import COMPILED, FOLDER, WHEEL, wheel_in_use
from edgespec.kernels import ggml
from edgespec.kernels.bindings import llama_cpp
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.device_failures import lost_devices
from edgespec.models.gguf.types import GGUFHeader

_FILE_TYPE = "LLAMA_FTYPE_MOSTLY_"
CPU, GPU, SHARED_GPU, ACCELERATOR = "cpu", "gpu", "shared gpu", "accelerator"
_KINDS = (CPU, GPU, SHARED_GPU, ACCELERATOR)  # in ggml's order


@dataclass(frozen=True)
class BuildDevice:
    """A device that the build can compute on.

    Attributes:
        kind: "cpu", "gpu" with memory of its own, "shared gpu" without, "accelerator" or "other".
        free, total: bytes of its memory; 0 if unknown.
    """

    name: str
    description: str
    kind: str
    free: int
    total: int

    @property
    def is_gpu(self) -> bool:
        """True if layers can be handed to it."""
        return self.kind in (GPU, SHARED_GPU)


@dataclass(frozen=True)
class Build:
    """A llama.cpp build."""

    version: str  # of llama-cpp-python, whose bindings are used
    features: tuple[str, ...]  # of the processor, used by its kernels, by llama.cpp's names: AVX2, NEON ..
    devices: tuple[BuildDevice, ...]  # without those that are lost; empty if ggml does not list them
    offloads: bool  # whether it was compiled for handing layers to a GPU
    # "compiled" when llama-cpp-python was installed, the "wheel" edgespec-llama, or a "folder" that
    # LLAMA_CPP_LIB_PATH names
    origin: str = COMPILED
    libraries: str = ""  # their folder
    wheel: str = ""  # the version of the wheel that they are from; empty if from none
    # the kind of processor that its kernels were chosen for, such as "haswell"; empty if it has those for one
    # alone
    variant: str = ""

    @property
    def gpus(self) -> tuple[BuildDevice, ...]:
        """The devices that layers can be handed to."""
        return tuple(device for device in self.devices if device.is_gpu)


def current_build() -> Build:
    start_backend()
    wheel = wheel_in_use()
    folder = ggml.libraries_folder()
    own = folder == Path(llama_cpp.__file__).parent / "lib"
    return Build(
        version=llama_cpp.__version__,
        features=parse_features(llama_cpp.llama_print_system_info().decode("utf-8", "replace")),
        devices=_devices(),
        offloads=_offloads(),
        origin=WHEEL if wheel is not None else COMPILED if own else FOLDER,
        libraries=str(folder),
        wheel=wheel.version if wheel is not None else "",
        variant=ggml.cpu_variant(),
    )


def parse_features(line: str) -> tuple[str, ...]:
    """The names from llama.cpp's line, such as "CPU : AVX2 = 1 | FMA = 1 | REPACK = 1 | "."""
    found = []
    for field in line.split("|"):
        name, _, value = field.rpartition(":")[2].partition("=")
        if value.strip() not in ("", "0"):
            found.append(name.strip())
    return tuple(found)


def _offloads() -> bool:
    """True if a backend for graphics cards was compiled in; llama.cpp counts other machines as such."""
    if not llama_cpp.llama_supports_gpu_offload():
        return False
    if not llama_cpp.llama_supports_rpc():
        return True
    try:
        count = ctypes.CFUNCTYPE(ctypes.c_size_t)(ggml.exported("ggml_backend_reg_count"))
        get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(ggml.exported("ggml_backend_reg_get"))
        name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(ggml.exported("ggml_backend_reg_name"))
    except AttributeError:
        return True
    return any(name(get(index)) not in (b"CPU", b"RPC", b"BLAS") for index in range(count()))


def _devices() -> tuple[BuildDevice, ...]:
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    amount = ctypes.POINTER(size)
    try:
        count = ctypes.CFUNCTYPE(size)(ggml.exported("ggml_backend_dev_count"))
        get = ctypes.CFUNCTYPE(pointer, size)(ggml.exported("ggml_backend_dev_get"))
        name = ctypes.CFUNCTYPE(text, pointer)(ggml.exported("ggml_backend_dev_name"))
        description = ctypes.CFUNCTYPE(text, pointer)(ggml.exported("ggml_backend_dev_description"))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(ggml.exported("ggml_backend_dev_type"))
        memory = ctypes.CFUNCTYPE(None, pointer, amount, amount)(ggml.exported("ggml_backend_dev_memory"))
    except AttributeError:
        return ()
    found = []
    for index in range(count()):
        device = get(index)
        if (name(device) or b"").decode("utf-8", "replace") in lost_devices():
            continue  # asking it for its memory would fail, too
        number, free, total = kind(device), size(), size()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            BuildDevice(
                name=(name(device) or b"").decode("utf-8", "replace"),
                description=(description(device) or b"").decode("utf-8", "replace").strip(),
                kind=_KINDS[number] if 0 <= number < len(_KINDS) else "other",
                free=free.value,
                total=total.value,
            )
        )
    return tuple(found)


def quantization_name(header: GGUFHeader) -> str:
    """The quantization that a file says it has, such as Q4_K_M; empty if it says none that is known."""
    number = header.metadata.get("general.file_type")
    names = (name for name in vars(llama_cpp) if name.startswith(_FILE_TYPE))
    return next((name.removeprefix(_FILE_TYPE) for name in names if getattr(llama_cpp, name) == number), "")
