"""Faults of the machine for running models: GPUs, cores, memory, disks and power."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.doctor.facts import Facts
from edgespec.doctor.finding import HINT, OK, WARNING, Finding
from edgespec.machine.disks import HDD, NETWORK, NVME, SSD, TMPFS, VIRTUAL
from edgespec.machine.memory import OVERCOMMIT_STRICT
from edgespec.units import readable

_SLOW, _FAST = 200e6, 1e9  # bytes per second: of a spinning disk, and of one that streams well
_BUSY = 0.4  # share of the cores' time
_LITTLE_MEMORY = 1 << 30
_SPARE_DISK = 1 << 30  # what packing leaves free
_LITTLE_DISK = 4 << 30
_SLOWNESS = {NVME: 0, SSD: 1, VIRTUAL: 1, HDD: 3, NETWORK: 3}  # a larger number is a slower disk
_UNKNOWN_SLOWNESS = 2


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, busy = facts.machine.cores, facts.machine.busy
    if cores.quota is not None and cores.quota < cores.allowed:
        yield Finding(
            HINT,
            "processor",
            f"A container limit gives this process the time of {cores.quota:g} of {cores.allowed} cores.",
            "Raise it (docker run --cpus) if the machine can spare more.",
        )
    if busy is not None and busy >= _BUSY:
        yield Finding(
            WARNING,
            "processor",
            f"Other programs keep the processor busy: {busy:.0%} of all cores just now.",
            "Close them, or lower --threads: a thread that waits for a core delays the others.",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.machine.memory
    if memory.overcommit == OVERCOMMIT_STRICT:
        left = f" {readable(memory.commit_left)} are left." if memory.commit_left is not None else ""
        yield Finding(
            WARNING,
            "memory",
            "The system gives out no more memory than it has (vm.overcommit_memory is 2), also where "
            f"a program only reserves it.{left}",
            "If loading fails: sudo sysctl vm.overcommit_memory=0",
        )
    if memory.address_space is not None:
        yield Finding(
            WARNING,
            "memory",
            f"This process may use {readable(memory.address_space)} of addresses (ulimit -v), and a streamed "
            "model takes as many as it is large.",
            "Lift it: ulimit -v unlimited",
        )
    if memory.swap_total == 0:
        yield Finding(
            HINT,
            "memory",
            "There is no swap: if memory runs out, the system kills a program, and not always the right one.",
            "Add swap, or leave memory free with --memory.",
        )
    elif memory.swap_used > memory.swap_total / 2:
        yield Finding(
            WARNING,
            "memory",
            f"{readable(memory.swap_used)} of {readable(memory.swap_total)} swap is in use: programs need "
            "more memory than there is.",
            "Close some programs, or lower --memory.",
        )
    if memory.available < _LITTLE_MEMORY:
        yield Finding(
            WARNING,
            "memory",
            f"Only {readable(memory.available)} of memory is free.",
            "Close other programs; then more of a model stays in memory.",
        )


def _disks(facts: Facts) -> Iterator[Finding]:
    disk, cache = facts.machine.disk, facts.cache
    if disk.kind in (HDD, NETWORK):
        what = "is a hard disk" if disk.kind == HDD else "is on the network"
        yield Finding(
            WARNING,
            "disk",
            f"The disk of {disk.path} {what}: every pass of a streamed model waits for it.",
            "Keep models and the cache (XDG_CACHE_HOME) on an SSD.",
        )
    elif facts.speed is not None and facts.speed < _FAST:
        yield Finding(
            WARNING if facts.speed < _SLOW else HINT,
            "disk",
            f"{readable(facts.speed)}/s were read from {disk.path}: a streamed pass takes "
            f"{2**30 / facts.speed:.1f} s for each GiB that does not fit.",
            "A faster disk speeds up every pass; so does keeping more of the model in memory.",
        )
    elif facts.speed is not None:
        yield Finding(OK, "disk", f"The disk is fast enough for streaming: {readable(facts.speed)}/s.")
    if disk.direct is False:
        yield Finding(
            HINT,
            "disk",
            f"The file system of {disk.path} ({disk.file_system or 'unknown'}) has no direct reads: weights "
            "go through the page cache, which adds a copy.",
            "ext4, xfs, btrfs and APFS support them.",
        )
    if cache.kind == TMPFS:
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} is in memory itself, so packed layers there take up the memory "
            "that they should save.",
            "Set XDG_CACHE_HOME to a folder on an SSD.",
        )
    elif _SLOWNESS.get(cache.kind, _UNKNOWN_SLOWNESS) > _SLOWNESS.get(disk.kind, _UNKNOWN_SLOWNESS):
        yield Finding(
            WARNING,
            "cache",
            f"The cache folder {cache.path} is on a slower disk ({cache.kind}) than the model ({disk.kind}), "
            "and streamed layers are read from there.",
            "Set XDG_CACHE_HOME to a folder on the faster disk, or stream the file itself: --pack never",
        )
    wanted = _packed(facts) + _SPARE_DISK
    if cache.total and cache.free < _LITTLE_DISK:
        yield Finding(
            WARNING,
            "cache",
            f"{readable(cache.free)} are free on the disk of the cache folder {cache.path}.",
            "Free some space: edgespec models list, edgespec models remove",
        )
    elif cache.total and cache.free < wanted:
        yield Finding(
            HINT,
            "cache",
            f"Packed layers of this model would take about {readable(_packed(facts))}, and "
            f"{readable(cache.free)} are free in {cache.path}: the model file is streamed, which is slower.",
            "Free some space, or set XDG_CACHE_HOME to a folder on another disk.",
        )


def _packed(facts: Facts) -> int:
    """Bytes of the packed file that loading the model would write."""
    model = facts.model
    return int(model.described["bytes"]) if model and model.memory["verdict"] == "streams" else 0


def _power(facts: Facts) -> Iterator[Finding]:
    power = facts.machine.power
    if power.saving:
        yield Finding(
            WARNING,
            "power",
            f"The system saves power: {power.saving}.",
            "Choose the balanced or performance profile: powerprofilesctl set performance"
            if power.profile
            else "sudo cpupower frequency-set -g performance",
        )
    if power.on_battery:
        charge = f", {power.charge:.0%} full" if power.charge is not None else ""
        yield Finding(
            HINT,
            "power",
            f"Running on battery{charge}" + (", with the lid closed." if power.lid_closed else "."),
            "Plug it in: most laptops compute faster then.",
        )


MACHINE_CHECKS = (_memory, _disks, _cores, _power)
