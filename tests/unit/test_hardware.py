"""Probes of machines: files as they look on real ones, and what holds on this one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from benchmarks.capped import cap_kind, run_capped
from edgespec.base.progress import no_progress
from edgespec.files.direct_reader import FileReader
from edgespec.machine.cores import probe_cores, usable_cores
from edgespec.machine.disks import Disk, disk_of, file_system_id
from edgespec.machine.gpus import Gpu, parse_nvidia_smi, probe_gpus
from edgespec.machine.memory import available_memory, probe_memory
from edgespec.machine.probe import probe
from edgespec.measure.throughput import _speed, measure_reading, read_speed
from tests.links import needs_links

MIB = 1 << 20
EPYC = "fpu avx avx2 f16c fma bmi2 avx512f avx512cd avx512vl avx512dq avx512bw avx512_vnni avx512vbmi"
MEMINFO = """MemTotal:       24684092 kB
MemFree:        21823456 kB
MemAvailable:   16777216 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
CommitLimit:    14439196 kB
Committed_AS:    4194304 kB
HugePages_Total:       0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def cores(root: Path, monkeypatch: pytest.MonkeyPatch, allowed: int = 8) -> int:
    monkeypatch.setattr("edgespec.machine.cores._allowed", lambda: allowed)
    return usable_cores(root)


# Cores


@pytest.mark.parametrize(
    ("line", "usable"),
    [
        ("max 100000", 8),
        ("250000 100000", 3),
        ("200000 100000", 2),
        ("5000 100000", 1),
        ("1600000 100000", 8),
    ],
)
def test_the_time_that_a_container_gives_is_rounded_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, line: str, usable: int
) -> None:
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/cpu.max", line)
    assert cores(root, monkeypatch) == usable


def test_the_tightest_of_nested_groups_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "proc/self/cgroup", "0::/user.slice/job.scope/inner")
    write(root, "sys/fs/cgroup/user.slice/cpu.max", "150000 100000")
    write(root, "sys/fs/cgroup/user.slice/job.scope/cpu.max", "600000 100000")
    write(root, "sys/fs/cgroup/user.slice/job.scope/inner/cpu.max", "max 100000")
    assert cores(root, monkeypatch) == 2
    assert probe_cores(root).quota == 1.5


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "usable"), [(-1, 8), (350000, 4), (50000, 1)])
def test_version_1_groups_too(
    root: Path, monkeypatch: pytest.MonkeyPatch, folder: str, quota: int, usable: int
) -> None:
    # A container that was not given a name space sees its path, and its own group at the top.
    write(root, "proc/self/cgroup", f"12:{folder}:/docker/0123abcd\n3:cpuset:/\n0::/")
    write(root, f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", quota)
    write(root, f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", 100000)
    assert cores(root, monkeypatch) == usable


@pytest.mark.parametrize("text", ["", "max", "100000", "-5 100000", "100000 0", "so much", "0::\n::::"])
def test_damaged_files_limit_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    write(root, "proc/self/cgroup", "0::/\n4\n")
    write(root, "sys/fs/cgroup/cpu.max", text)
    write(root, "sys/fs/cgroup/memory.max", text)
    assert cores(root, monkeypatch) == 8
    assert probe_memory(root).container_limit is None


def test_a_processor_is_named_with_what_kernels_use(root: Path) -> None:
    block = f"processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: {EPYC} sse2\n"
    write(root, "proc/cpuinfo", block + "\n" + block)
    found = probe_cores(root)
    assert found.model == "AMD EPYC 9B14"
    assert found.features == (
        *("AVX", "AVX2", "F16C", "FMA", "BMI2"),
        *("AVX512", "AVX512_VBMI", "AVX512_VNNI"),
    )


def test_an_arm_board_with_unlike_cores_has_what_all_can_do(root: Path) -> None:
    little, big = "fp asimd fphp asimdhp asimddp", "fp asimd fphp asimdhp asimddp sve i8mm"
    write(root, "proc/cpuinfo", f"processor : 0\nFeatures : {little}\n\nprocessor : 4\nFeatures : {big}\n")
    write(root, "proc/device-tree/model", "Radxa ROCK 5B\0")
    found = probe_cores(root)
    assert (found.model, found.features) == ("Radxa ROCK 5B", ("NEON", "FP16_VA", "DOTPROD"))


# Memory


def test_memory_is_read_from_meminfo(root: Path) -> None:
    write(root, "proc/meminfo", MEMINFO)
    found = probe_memory(root)
    assert (found.total, found.available) == (24684092 * 1024, 16 << 30)
    assert (found.swap_total, found.swap_used) == (2 << 30, 1 << 30)


def test_a_containers_memory_counts_without_what_it_only_caches(root: Path) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", "0::/a/b")
    for group, limit in (("a", 4096 * MIB), ("a/b", "max")):
        write(root, f"sys/fs/cgroup/{group}/memory.max", limit)
        write(root, f"sys/fs/cgroup/{group}/memory.current", 3000 * MIB)
        write(root, f"sys/fs/cgroup/{group}/memory.stat", f"anon 5\ninactive_file {500 * MIB}")
    assert available_memory(root) == (4096 - 3000 + 500) * MIB
    assert probe_memory(root).container_limit == 4096 * MIB


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage", "prefix"),
    [
        ("0::/pod", "pod", "memory.max", "memory.current", ""),
        ("4:memory:/pod", "memory/pod", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_page_cache_that_was_read_twice_is_free_and_shared_memory_is_not(
    root: Path, line: str, folder: str, limit: str, usage: str, prefix: str
) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", line)
    write(root, f"sys/fs/cgroup/{folder}/{limit}", 8000 * MIB)
    write(root, f"sys/fs/cgroup/{folder}/{usage}", 7500 * MIB)
    stat = {"file": 7000, "cache": 7000, "shmem": 600, "inactive_anon": 600}
    stat |= {"inactive_file": 400, "active_file": 6000, "active_anon": 500}
    rows = [f"{prefix}{name} {size * MIB}" for name, size in stat.items()]
    write(root, f"sys/fs/cgroup/{folder}/memory.stat", "\n".join(rows))
    assert available_memory(root) == (8000 - 7500 + 6400) * MIB


def test_more_page_cache_than_usage_frees_no_more_than_the_limit(root: Path) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/memory.max", 2000 * MIB)
    write(root, "sys/fs/cgroup/memory.current", 100 * MIB)  # read a moment after the next
    write(root, "sys/fs/cgroup/memory.stat", f"active_file {900 * MIB}")
    assert available_memory(root) == 2000 * MIB


@pytest.mark.parametrize("high", [2048 * MIB, 8192 * MIB, "max"])
@pytest.mark.parametrize("maximum", [4096 * MIB, "max"])
def test_a_throttle_limits_memory_too(root: Path, high: int | str, maximum: int | str) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", "0::/user.slice")
    write(root, "sys/fs/cgroup/user.slice/memory.max", maximum)
    write(root, "sys/fs/cgroup/user.slice/memory.high", high)
    write(root, "sys/fs/cgroup/user.slice/memory.current", 0)
    limits = [limit for limit in (maximum, high) if isinstance(limit, int)]
    assert available_memory(root) == min([16 << 30, *limits])
    assert probe_memory(root).container_limit == min(limits, default=None)


@pytest.mark.parametrize("colons", ["pod7.slice:cri-containerd:c0ffee", "a:b::c"])
def test_a_group_with_colons_in_its_path_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, colons: str
) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", f"3:cpuset:/\n0::/kubepods.slice/{colons}")
    group = f"sys/fs/cgroup/kubepods.slice/{colons}"
    write(root, f"{group}/memory.max", 2048 * MIB)
    write(root, f"{group}/memory.current", 48 * MIB)
    write(root, f"{group}/cpu.max", "200000 100000")
    assert available_memory(root) == 2000 * MIB
    assert cores(root, monkeypatch) == 2


_READ_TWICE = """
import sys
from edgespec.machine.memory import available_memory
for _ in range(3):
    with open(sys.argv[1], "rb") as file:
        while file.read(1 << 20):
            pass
print(available_memory())
"""


@pytest.mark.skipif(cap_kind() == "none", reason="takes root, or systemd for the user")
def test_a_file_that_a_group_has_read_before_leaves_its_memory_free(tmp_path: Path) -> None:
    size, cap = 128 * MIB, 192 * MIB
    file = tmp_path / "model"
    with file.open("wb") as out:
        out.write(bytes(size))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the group is charged for it
    ran = run_capped([sys.executable, "-c", _READ_TWICE, str(file)], cap)
    assert ran.status == 0, ran.errors
    assert ran.peak_bytes > size
    assert int(ran.output) > size


def test_version_1_memory_groups_with_no_limit(root: Path) -> None:
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/self/cgroup", "4:memory:/process/1")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 5)
    assert available_memory(root) == 16 << 30


# Disks


def mounts(root: Path, *rows: tuple[str, str, str, str]) -> None:
    lines = [
        f"{number} 1 {device} / {point} rw,relatime shared:1 - {kind} {source} rw"
        for number, (device, point, kind, source) in enumerate(rows)
    ]
    write(root, "proc/self/mountinfo", "\n".join(lines))


def block_device(root: Path, number: str, path: str, rotational: int | None = None) -> Path:
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True, exist_ok=True)
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    if rotational is not None:
        write(folder, "queue/rotational", rotational)
    return folder


def look(root: Path, path: Path, major: int, minor: int) -> Disk:
    return disk_of(path, root, number_of=(major, minor))


@needs_links
@pytest.mark.parametrize(
    ("device", "rotational", "kind"),
    [
        ("nvme0n1", 0, "nvme"),
        ("sda", 0, "ssd"),
        ("sda", 1, "hdd"),
        ("vda", 1, "virtual"),
        ("sda", None, "unknown"),
    ],
)
def test_kinds_of_disks(root: Path, device: str, rotational: int | None, kind: str) -> None:
    folder = block_device(root, "259:0", f"pci/{device}", rotational)
    partition = folder / f"{device}p2"
    partition.mkdir()
    write(partition, "partition", 2)
    (root / "sys/dev/block/259:2").symlink_to(partition)
    mounts(root, ("259:2", "/", "ext4", f"/dev/{device}p2"))
    found = look(root, root / "not/there/yet", 259, 2)
    assert (found.device, found.kind, found.file_system) == (f"/dev/{device}p2", kind, "ext4")
    assert found.path == root
    assert 0 < found.free < found.total


@needs_links
def test_an_encrypted_disk_is_what_it_lies_on(root: Path) -> None:
    disk = block_device(root, "8:0", "pci/sda", 1)
    mapped = block_device(root, "253:0", "virtual/dm-0", 0)
    (mapped / "slaves").mkdir()
    (mapped / "slaves/sda").symlink_to(disk)
    mounts(root, ("253:0", "/", "ext4", "/dev/mapper/luks-home"))
    assert look(root, root, 253, 0).kind == "hdd"


@needs_links
def test_a_subvolume_is_found_by_its_device(root: Path) -> None:
    # btrfs gives files a device number that is in no list.
    folder = block_device(root, "259:1", "pci/nvme0n1", 0)
    (root / "sys/class/block").mkdir(parents=True)
    (root / "sys/class/block/nvme0n1p3").symlink_to(folder)
    mounts(root, ("0:30", "/", "btrfs", "/dev/nvme0n1p3"))
    assert look(root, root, 0, 41).kind == "nvme"


@pytest.mark.parametrize(
    ("file_system", "source", "kind"),
    [
        ("tmpfs", "tmpfs", "tmpfs"),
        ("overlay", "overlay", "overlay"),
        ("nfs4", "server:/home", "network"),
        ("9p", "C:\\134", "network"),
        ("fuse.sshfs", "me@host:", "network"),
        ("zfs", "tank/home", "unknown"),
    ],
)
def test_file_systems_without_a_disk_of_their_own(
    root: Path, file_system: str, source: str, kind: str
) -> None:
    mounts(root, ("0:5", "/", "ext4", "/dev/sda1"), ("0:44", str(root), file_system, source))
    found = look(root, root, 0, 44)
    assert (found.kind, found.file_system) == (kind, file_system)


def test_a_mount_with_a_space_in_its_name(root: Path) -> None:
    folder = root / "my models"
    folder.mkdir()
    spaced = f"{root}/my\\040models"
    mounts(root, ("0:5", root.anchor, "ext4", "/dev/sda1"), ("0:6", spaced, "xfs", "/dev/sdb1"))
    assert look(root, folder, 0, 6).file_system == "xfs"
    assert look(root, root, 0, 5).file_system == "ext4"


def test_this_disk_is_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    found = disk_of(file)
    usage = psutil.disk_usage(str(tmp_path))
    assert found.total == usage.total
    assert found.file_system
    assert found.direct is not None


def test_a_speed_is_measured_and_a_small_file_has_none(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(20 << 20))
    if not disk_of(file).direct:
        pytest.skip("this file system has no direct reads")
    speed = read_speed(file)
    assert speed is not None
    assert speed > 1e5
    file.write_bytes(bytes(1000))
    assert read_speed(file) is None
    assert read_speed(tmp_path / "absent") is None


def test_a_measurement_of_a_disk_reads_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """What was read a moment ago may come from a cache that no direct read bypasses."""
    path, block = tmp_path / "file", 1 << 20
    path.write_bytes(bytes(8 * block))
    with closing(FileReader(path)) as reader:
        speed, place = _speed(reader, block, 2, math.inf, 3)
        assert speed > 0
        assert place == 3 * block
        _, place = _speed(reader, block, 1, math.inf, 7, start=place)
        assert place == 2 * block, "it starts over at the end"
    found = measure_reading(path, 0.2, no_progress)
    assert found.buffered > 0
    assert (found.direct > 0) is bool(disk_of(path).direct)
    assert found.streamed_rate == 0


# Graphics


def test_graphics_processors_from_their_drivers(root: Path) -> None:
    write(root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA RTX A2000\nIRQ:   51")
    for card, vendor in (("card0", "0x10de"), ("card1", "0x1002"), ("card2", "0x1234")):
        write(root, f"sys/class/drm/{card}/device/vendor", vendor)
    write(root, "sys/class/drm/card1/device/device", "0x73bf")
    write(root, "sys/class/drm/card1/device/mem_info_vram_total", 16 << 30)
    write(root, "sys/class/drm/card1-DP-1/device/vendor", "0x1002")  # where a screen is plugged in
    assert probe_gpus(root) == (Gpu("NVIDIA RTX A2000", "NVIDIA"), Gpu("AMD 0x73bf", "AMD", 16 << 30))


def test_what_nvidia_smi_prints() -> None:
    table = "NVIDIA GeForce RTX 3060, 12288\nNVIDIA GB10, [N/A]\n\nFailed to initialize NVML\n"
    assert parse_nvidia_smi(table) == [
        Gpu("NVIDIA GeForce RTX 3060", "NVIDIA", 12 << 30),
        Gpu("NVIDIA GB10", "NVIDIA", None),
    ]


# All of it


def test_a_machine_that_tells_nothing(root: Path) -> None:
    found = probe(root / "nowhere", root)
    assert found.cores.features == ()
    assert found.cores.usable >= 1
    assert found.memory.total > 0
    assert found.gpus == ()


def test_this_machine_holds_together(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert 1 <= found.cores.usable <= found.cores.allowed <= found.cores.total
    assert 0 < found.memory.available <= found.memory.total
    assert 0 <= found.memory.swap_used <= found.memory.swap_total
    assert json.loads(json.dumps(found.to_json()))["disk"]["path"] == str(tmp_path)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_counts() -> None:
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from edgespec.machine.probe import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@needs_links
def test_a_disk_is_known_by_its_file_system(tmp_path: Path) -> None:
    """Numbers of devices are given anew at each start of the system."""
    links = tmp_path / "dev/disk/by-uuid"
    links.mkdir(parents=True)
    (links / "1234-ABCD").symlink_to(os.devnull)
    (links / "5678-EFGH").symlink_to(tmp_path / "nowhere")
    number = Path(os.devnull).stat().st_rdev
    assert file_system_id(tmp_path, tmp_path, number=number) == "1234-ABCD"
    assert file_system_id(tmp_path) == file_system_id(tmp_path / "dev") not in ("", "0", "1234-ABCD")
    with pytest.raises(FileNotFoundError):
        file_system_id(tmp_path / "nowhere")
