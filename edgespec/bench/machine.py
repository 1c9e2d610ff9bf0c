"""What was measured on: processor, memory, disk and versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import edgespec
from edgespec.hardware.probe import available_memory, usable_cores


def describe_machine(path: Path) -> dict[str, Any]:
    """The machine, and the disk that a file is on."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "available_bytes": available_memory(),
        "disk": disk_kind(path),
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str | None]:
    """Of EdgeSpec, of llama.cpp's bindings, and of Python."""
    return {
        "edgespec": edgespec.__version__,
        "llama-cpp-python": _version("llama-cpp-python"),
        "python": platform.python_version(),
    }


def cpu_model() -> str | None:
    """The processor's name, where the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine() or None


def disk_kind(path: Path) -> str | None:
    """What kind of disk a file is on; None where the system does not tell."""
    try:
        number = path.stat().st_dev
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except (OSError, AttributeError):
        return None
    if not (device / "queue").is_dir():
        device = device.parent  # of a partition
    if device.name.startswith(("vd", "xvd")):
        return f"virtual disk ({device.name})"  # which cannot know what it stands on
    if device.name.startswith("nvme"):
        kind = "NVMe SSD"
    else:
        try:
            kind = "hard disk" if (device / "queue/rotational").read_text().strip() == "1" else "SSD"
        except OSError:
            return None
    try:
        return f"{kind} ({(device / 'device/model').read_text().strip()})"
    except OSError:
        return f"{kind} ({device.name})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
