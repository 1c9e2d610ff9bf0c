"""The doctor: each fault is found from its facts, and nothing else; it never crashes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.commands.doctor import describe, format_findings
from edgespec.cli.main import main
from edgespec.doctor.checks import ERROR, HINT, SEVERITIES, WARNING, diagnose
from edgespec.doctor.facts import DeviceCheck, Facts, gather
from edgespec.doctor.kernels import KernelFacts, LayoutFacts
from edgespec.errors import BackendError, UsageError
from edgespec.llama.build import Build, BuildDevice, parse_features
from edgespec.machine.cores import Cores
from edgespec.machine.disks import Disk
from edgespec.machine.gpus import Gpu
from edgespec.machine.memory import Memory
from edgespec.machine.probe import Machine

GIB = 1 << 30

CORES = Cores("A fine processor", 8, 8, None, 8, ("AVX2", "AVX512"))
MEMORY = Memory(32 * GIB, 24 * GIB, swap_total=8 * GIB)
DISK = Disk(Path("/home/me"), "/dev/nvme0n1p2", "nvme", "ext4", 500 * GIB, 900 * GIB, direct=True)
BUILD = Build("0.3.36", ("AVX2", "AVX512", "REPACK"), (), offloads=False)
WELL = Facts(Machine(CORES, MEMORY, DISK, ()), DISK, BUILD, speed=3e9)


def with_machine(**parts: Any) -> Facts:
    return replace(WELL, machine=replace(WELL.machine, **parts))


def with_model(verdict: str, drafter: str = "/models/small.gguf") -> Facts:
    memory = {
        "verdict": verdict,
        "needed_bytes": 40 * GIB,
        "available_bytes": 24 * GIB,
        "least_bytes": 30 * GIB,
        "streamed_bytes_per_pass": 18 * GIB,
    }
    model = {
        "name": "big",
        "path": "/models/big.gguf",
        "drafters": [],
        "drafter": drafter or None,
        "drafter_reason": "registered",
        "memory": memory,
        "bytes": 38 * GIB,
        "title": "Big",
        "quantization": [{"types": {"Q4_K": 1, "F32": 1}}],
    }
    return replace(WELL, model=model)


def test_of_a_machine_that_is_well_nothing_is_wrong() -> None:
    assert diagnose(WELL) == []
    assert diagnose(with_machine(cores=replace(CORES, features=("AVX2", "AMX_INT8")))) == []
    assert format_findings([]) == ["No problems found."]


FAULTS = {
    "no llama.cpp": (
        replace(WELL, build=None, errors=(("llama.cpp", BackendError("No libllama.so.", "Compile it.")),)),
        ERROR,
        "No libllama.so. Compile it.",
    ),
    "a build for old processors": (
        replace(WELL, build=replace(BUILD, features=("AVX2",))),
        WARNING,
        'AVX512.*CMAKE_ARGS.*"-DGGML_NATIVE=ON -DGGML_RPC=ON".*pip install .*llama-cpp-python==0.3.36',
    ),
    "kernels that crash": (
        replace(WELL, kernels=KernelFacts((LayoutFacts("OTHER", False, "llama.cpp crashed", "setup.py"),))),
        WARNING,
        "OTHER kernels are not used: llama.cpp crashed.*setup.py",
    ),
    "kernels that are left out": (
        replace(WELL, kernels=KernelFacts((LayoutFacts("OTHER", False),), "plain")),
        HINT,
        "EDGESPEC_KERNELS=plain leaves out OTHER.*Unset it",
    ),
    "kernels that cannot be had": (
        replace(WELL, errors=(("kernels", UsageError("It has no AMX.", "Unset it.")),)),
        ERROR,
        "It has no AMX",
    ),
    "no streaming": (replace(WELL, no_streaming="a tensor's size is 5"), WARNING, "a tensor's size is 5"),
    "an idle gpu": (
        with_machine(gpus=(Gpu("RTX 3060", "NVIDIA", 12 * GIB),)),
        HINT,
        "RTX 3060.*-DGGML_CUDA=on.*",
    ),
    "few addresses": (
        with_machine(memory=replace(MEMORY, address_space=GIB)),
        WARNING,
        "ulimit -v unlimited",
    ),
    "no memory": (with_machine(memory=replace(MEMORY, available=GIB // 2)), WARNING, "512.0 MiB"),
    "a hard disk": (with_machine(disk=replace(DISK, kind="hdd")), WARNING, "is a hard disk.*SSD"),
    "a disk elsewhere": (with_machine(disk=replace(DISK, kind="network")), WARNING, "network"),
    "a slow disk": (replace(WELL, speed=120e6), WARNING, "114.4 MiB/s.*8.9 s for each GiB"),
    "a disk that could be faster": (replace(WELL, speed=540e6), HINT, "515.0 MiB/s"),
    "a cache in memory": (replace(WELL, cache=replace(DISK, kind="tmpfs")), WARNING, "XDG_CACHE_HOME"),
    "a cache on a slower disk": (replace(WELL, cache=replace(DISK, kind="hdd")), WARNING, "--pack never"),
    "a full cache": (
        replace(WELL, cache=replace(DISK, free=GIB // 2)),
        WARNING,
        "512.0 MiB are free.*models remove",
    ),
    "no room for packed layers": (
        replace(with_model("streams"), cache=replace(DISK, free=20 * GIB)),
        WARNING,
        "20.0 GiB are free.*38.0 GiB",
    ),
    "a model that is too large": (with_model("too large"), ERROR, "30.0 GiB.*24.0 GiB is free"),
    "a model without a drafter": (with_model("fits", drafter=""), HINT, "edgespec draft make big"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_alone_with_what_to_do(name: str) -> None:
    facts, severity, words = FAULTS[name]
    (finding,) = diagnose(facts)
    assert finding.severity == severity
    assert re.search(words, f"{finding.what} {finding.do}")
    assert finding.do
    # And shown as well as counted.
    assert any(finding.what in line for line in format_findings(diagnose(facts)))
    describe(facts)


def test_the_worst_comes_first_and_is_shown_last() -> None:
    facts = replace(with_model("too large"), speed=540e6, cache=replace(DISK, kind="hdd"))
    severities = [SEVERITIES.index(finding.severity) for finding in diagnose(facts)]
    assert severities == sorted(severities, reverse=True)
    assert len({*severities}) == 3
    assert format_findings(diagnose(facts))[-2].startswith("error")


def test_a_streamed_model_is_told_by_the_second() -> None:
    facts = with_model("streams")
    assert diagnose(facts) == []
    assert any("18.0 GiB read from disk in every pass, 6.4 s at" in text for _, text in describe(facts))


def test_a_gpu_that_the_build_uses_is_well() -> None:
    gpu = BuildDevice("CUDA0", "RTX 3060", "gpu", 11 * GIB, 12 * GIB)
    facts = replace(with_machine(gpus=(Gpu("RTX 3060", "NVIDIA"),)), build=replace(BUILD, devices=(gpu,)))
    device = DeviceCheck("CUDA0", "RTX 3060", 11 * GIB, 12 * GIB, "It is fast.", faster=True)
    facts = replace(facts, devices=(device,))
    assert diagnose(facts) == []
    assert ("device", "It is fast.") in describe(facts)
    for changes, what in (
        ({"problem": "SIGSEGV"}, r"CUDA0 \(RTX 3060\): its trial failed \(SIGSEGV\)"),
        ({"untried": "was killed"}, "its process was killed"),
    ):
        (finding,) = diagnose(replace(facts, devices=(replace(device, **changes),)))
        assert finding.severity == WARNING
        assert re.search(what, finding.what)


def test_kernels_that_work_are_told_with_their_speed() -> None:
    fast = LayoutFacts("CPU_REPACK", True, speedup=((1, 1.52), (8, 2.0), (32, 3.04)))
    facts = replace(WELL, kernels=KernelFacts((fast,)))
    assert diagnose(facts) == []
    assert ("", "CPU_REPACK: 1.5, 2.0, 3.0 times as fast as plain at 1, 8, 32 rows") in describe(facts)


def test_findings_fit_a_narrow_window() -> None:
    lines = format_findings(diagnose(FAULTS["a build for old processors"][0]), 40)
    assert len(lines) > 2
    # Only what must be copied whole is longer.
    assert all(len(line) < 40 or " " not in line.strip() for line in lines)


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("CPU : SSE3 = 1 | AVX2 = 1 | REPACK = 1 | ", ("SSE3", "AVX2", "REPACK")),
        ("CUDA : ARCHS = 860 | CPU : NEON = 1 | SVE_CNT = 0 | DOTPROD = 1 | ", ("ARCHS", "NEON", "DOTPROD")),
        ("", ()),
    ],
)
def test_llama_cpps_own_words(line: str, features: tuple[str, ...]) -> None:
    assert parse_features(line) == features


# The real thing


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--no-disk-check"])
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    record = json.loads(line)
    assert code == (1 if any(f["severity"] == ERROR for f in record["findings"]) else 0)
    assert all(f["do"] for f in record["findings"])
    assert record["streams"] is True
    assert record["build"]["devices"]
    for layout in record["kernels"]["layouts"]:
        assert layout["used"] or layout["problem"] or record["kernels"]["setting"] != "auto"
    assert record["model"] is None


def test_lines_for_people_say_the_same(capsys: pytest.CaptureFixture[str], smol_path: Path) -> None:
    assert main(["doctor", str(smol_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("edgespec", "processor", "memory", "disk", "cache", "llama.cpp", "model", "drafter"):
        assert any(line.startswith(name) for line in out.splitlines()), name
    assert re.search("^ +fits: .* needed, .* free$", out, re.MULTILINE)


def test_a_model_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "smolm2-135m", "--no-disk-check"]) == 1
    assert "Did you mean smollm2-135m" in capsys.readouterr().out


def test_a_damaged_configuration_is_found_and_stops_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("memry = '12GiB'\n")
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    assert main(["doctor", "--no-disk-check"]) == 1
    assert re.search(
        "^error +settings: .*sets 'memry', but there is no such setting",
        capsys.readouterr().out,
        re.MULTILINE,
    )


def test_a_library_that_cannot_be_loaded_is_a_finding() -> None:
    program = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from edgespec.cli.main import main; sys.exit(main(['doctor', '--no-disk-check']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "llama.cpp cannot be loaded" in done.stdout


def test_a_disk_is_only_read_where_it_may_be(monkeypatch: pytest.MonkeyPatch, smol_path: Path) -> None:
    told: list[str] = []
    facts = gather(str(smol_path), measure_disk=False, on_progress=lambda what, _: told.append(what))
    assert (facts.speed, facts.speed_file) == (None, None)
    assert "Reading from the disk" not in told
    facts = gather(str(smol_path), on_progress=lambda what, _: told.append(what))
    assert "Reading from the disk" in told
    assert facts.speed is None or facts.speed_file == smol_path
