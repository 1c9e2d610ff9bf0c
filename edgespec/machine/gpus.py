"""GPUs that the system knows, whether or not the llama.cpp build can use them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from edgespec.machine.cgroups import ROOT, read_number, read_text
from edgespec.processes.children import run

NVIDIA, AMD, INTEL = "NVIDIA", "AMD", "Intel"
_VENDORS = {"0x10de": NVIDIA, "0x1002": AMD, "0x8086": INTEL}


@dataclass(frozen=True)
class Gpu:
    """A GPU; `memory` is in bytes, None if unknown."""

    name: str
    vendor: str
    memory: int | None = None


def probe_gpus(root: Path = ROOT) -> tuple[Gpu, ...]:
    """The GPUs of NVIDIA, AMD and Intel that have a driver."""
    nvidia = _from_nvidia_smi() if root == ROOT else []
    nvidia = nvidia or _nvidia_from_proc(root)
    others = [gpu for gpu in _from_drm(root) if gpu.vendor != NVIDIA or not nvidia]
    return (*nvidia, *others)


def parse_nvidia_smi(table: str) -> list[Gpu]:
    """GPUs from lines such as "NVIDIA GeForce RTX 3060, 12288": a name and MiB."""
    found = []
    for line in table.splitlines():
        name, comma, size = line.rpartition(",")
        if comma and name.strip():
            mebibytes = size.strip()
            found.append(Gpu(name.strip(), NVIDIA, int(mebibytes) << 20 if mebibytes.isdigit() else None))
    return found


def _from_nvidia_smi() -> list[Gpu]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = run(query, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else []


def _nvidia_from_proc(root: Path) -> list[Gpu]:
    found = []
    for folder in _listing(root / "proc/driver/nvidia/gpus"):
        lines = [line.partition(":") for line in read_text(folder / "information").splitlines()]
        name = next((value.strip() for key, _, value in lines if key.strip() == "Model"), NVIDIA)
        found.append(Gpu(name, NVIDIA))
    return found


def _from_drm(root: Path) -> list[Gpu]:
    found = []
    for folder in _listing(root / "sys/class/drm"):
        if not folder.name.removeprefix("card").isdigit():
            continue  # a connector, such as card0-DP-1
        vendor = _VENDORS.get(read_text(folder / "device/vendor").lower())
        if vendor is not None:
            name = (
                read_text(folder / "device/product_name") or f"{vendor} {read_text(folder / 'device/device')}"
            )
            found.append(Gpu(name.strip(), vendor, read_number(folder / "device/mem_info_vram_total")))
    return found


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
