"""Processor cores: how many can be used, and which instructions they have."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.machine.cgroups import ROOT, cgroups, read_number, read_text
from edgespec.processes.children import find_program, run

# The features that llama.cpp's kernels use, by the names that it prints, and the system's flags for them.
_X86 = {
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_tile", "amx_int8"),
}
_ARM = {
    "NEON": ("asimd",),
    "FP16_VA": ("asimdhp",),
    "DOTPROD": ("asimddp",),
    "MATMUL_INT8": ("i8mm",),
    "SVE": ("sve",),
    "SME": ("sme",),
}
_APPLE = {
    "NEON": ("AdvSIMD",),
    "FP16_VA": ("FEAT_FP16",),
    "DOTPROD": ("FEAT_DotProd",),
    "MATMUL_INT8": ("FEAT_I8MM",),
    "SME": ("FEAT_SME",),
}


@dataclass(frozen=True)
class Cores:
    """The processor."""

    model: str  # its name; empty if unknown
    total: int  # hardware threads of the system
    allowed: int  # hardware threads that this process may run on
    quota: float | None  # cores' worth of time that its container allows; None without such a limit
    usable: int  # the most software threads that can run at once
    features: tuple[str, ...]  # that llama.cpp could use, by the names that it prints
    physical: int = 0  # physical cores among those allowed


def probe_cores(root: Path = ROOT) -> Cores:
    """The processor of this machine."""
    quota = min(_quotas(root), default=None)
    model, features = _from_linux(root)
    if not model and root == ROOT and sys.platform == "darwin":
        model, features = _from_apple(_sysctl())
    return Cores(
        model=model or (platform.processor() if root == ROOT else ""),
        total=os.cpu_count() or 1,
        allowed=_allowed(),
        quota=quota,
        usable=usable_cores(root),
        features=features,
        physical=physical_cores(root),
    )


def usable_cores(root: Path = ROOT) -> int:
    """Hardware threads this process may keep busy, within its affinity and quota, rounded up."""
    return max(min([_allowed(), *(math.ceil(quota) for quota in _quotas(root))]), 1)


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores this process may use."""
    allowed = allowed_numbers()
    if allowed is None:
        return psutil.cpu_count(logical=False) or _allowed()
    folder = root / "sys/devices/system/cpu"
    siblings = {
        read_text(folder / f"cpu{number}/topology/thread_siblings_list") or str(number) for number in allowed
    }
    return max(len(siblings), 1)


def thread_counts(root: Path = ROOT) -> tuple[int, ...]:
    """Thread counts that may be the fastest: one for each physical core, one for each hardware thread."""
    most = usable_cores(root)
    return tuple(sorted({min(physical_cores(root), most), most}))


def default_threads(root: Path = ROOT) -> int:
    """Threads to compute with if nothing was measured: one for each physical core."""
    return thread_counts(root)[0]


def allowed_numbers() -> set[int] | None:
    """The numbers of the cores that this process may use; None where the system does not say."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return None


def _allowed() -> int:
    allowed = allowed_numbers()
    return len(allowed) if allowed else psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time that each control group of this process allows."""
    for version, folder in cgroups("cpu", root):
        if version == 2:
            words = read_text(folder / "cpu.max").split()  # "max 100000" is no limit
            share, period = ([int(w) if w.isdigit() else None for w in words] + [None, None])[:2]
        else:
            share, period = (
                read_number(folder / "cpu.cfs_quota_us"),
                read_number(folder / "cpu.cfs_period_us"),
            )
        if share is not None and share > 0 and period:  # -1 is no limit
            yield share / period


def _from_linux(root: Path) -> tuple[str, tuple[str, ...]]:
    """The processor's name and features, from /proc/cpuinfo; of cores that differ, their common features."""
    model, sets = "", []
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name.lower() in ("model name", "hardware") and not model:
            model = value
        elif name in ("flags", "Features"):
            sets.append(frozenset(value.split()))
    shared = frozenset.intersection(*sets) if sets else frozenset()
    board = read_text(root / "proc/device-tree/model") if not model else ""
    return model or board, _named(_X86 | _ARM, shared)


def _from_apple(settings: str) -> tuple[str, tuple[str, ...]]:
    """Count cores from the output of `sysctl -a`."""
    rows = dict(line.split(": ", 1) for line in settings.splitlines() if ": " in line)
    flags = {
        name.rpartition(".")[2]
        for name, value in rows.items()
        if name.startswith("hw.optional.") and value.strip() == "1"
    }
    flags |= set(rows.get("machdep.cpu.features", "").lower().split())
    flags |= set(rows.get("machdep.cpu.leaf7_features", "").lower().split())
    flags |= {"avx"} if "avx1.0" in flags else set()
    return rows.get("machdep.cpu.brand_string", ""), _named(_X86 | _APPLE, flags)


def _named(table: dict[str, tuple[str, ...]], flags: frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(name for name, wanted in table.items() if flags.issuperset(wanted))


def _sysctl() -> str:
    program = find_program("sysctl") or "/usr/sbin/sysctl"
    try:
        done = run([program, "-a"], capture_output=True, text=True, timeout=2, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout)
