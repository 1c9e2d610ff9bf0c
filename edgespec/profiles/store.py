"""The profile store: measurements of this machine, kept for the next run in small JSON files.

A file is named after everything that its figures depend on: the machine, the llama.cpp build, the model, the
settings. If one of these changes, a different file is used, so nothing stale is ever read. A file that cannot
be read is treated as missing.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP
from edgespec.costs.yields import TreeYields
from edgespec.files.small_json import read_json, save_json
from edgespec.files.user_folders import cache_folder
from edgespec.files.writing import writing_to
from edgespec.machine.contention import DISTURBED
from edgespec.machine.cores import probe_cores
from edgespec.machine.disks import file_system_id
from edgespec.profiles.figures import DeviceProfile, Figures

_VERSION = 3
_PROFILE_BYTES = 1 << 14  # more than the files of a profile take
_NOISY = 0.15  # half the interquartile range, relative to the median
_T = TypeVar("_T")

Key = Mapping[str, str]


@dataclass(frozen=True)
class ProfileKeys:
    """The keys under which the measurements of one pair on this machine are stored."""

    # keys for the target's passes and the drafter's steps
    passes: Key
    drafts: Key
    # fingerprints of the models
    target: str
    drafter: str
    threads: int  # CPU threads

    @classmethod
    def of(
        cls,
        target: str,
        drafter: str,
        *,
        threads: int,
        mode: str,
        workers: str = "",
        drafter_device: str = "",
    ) -> ProfileKeys:
        """The keys for models with these header fingerprints.

        Args:
            drafter: may also be "lookup" or "none".
            mode: everything else that passes depend on: row rule, kernels.
            workers: which layers devices hold, and how far away these are; empty if they hold none.
            drafter_device: that the drafter is on; empty for the processor.
        """
        machine = machine_identity() | {"threads": str(threads)}
        elsewhere = {"workers": workers} if workers else {}
        on = {"device": drafter_device} if drafter_device else {}
        return cls(
            machine | {"model": target, "mode": mode} | elsewhere,
            machine | {"model": drafter} | on,
            target,
            drafter,
            threads,
        )

    def yields(self, temperature: float) -> Key:
        """The key for what this pair's trees yield, which does not depend on the machine."""
        return {"target": self.target, "drafter": self.drafter, "sampled": str(temperature > 0)}


def disk_key(path: Path) -> dict[str, str]:
    """The key for the disk that a file or folder is on.

    Raises:
        OSError: there is no such file.
    """
    return {"host": platform.node(), "file_system": file_system_id(path)}


def machine_identity() -> dict[str, str]:
    """The facts that measurements depend on besides models: processor, memory, llama.cpp build."""
    from edgespec.llama.runtime.backend import build_identity

    return {
        "machine": f"{platform.machine()} {probe_cores().model}",
        "memory": f"{round(psutil.virtual_memory().total / (1 << 30))} GiB",
        "build": build_identity(),
    }


@dataclass(frozen=True)
class PassProfile(Figures):
    """Measured passes of one target."""

    compute: Curve  # seconds of a pass without those spent waiting for the disk, by rows
    spread: tuple[float, ...] = ()  # for each point, half its interquartile range relative to the median
    accept_s: float = 0.0  # seconds of a round outside the pass and the draft
    streamed: bool = False  # whether layers were streamed during the measurement
    # bytes of weights that arrive from disk per second while a pass runs; 0 if none do
    read_rate: float = 0.0
    # the model's size
    weight_bytes: int = 0
    parameters: int = 0
    # how well reading and arithmetic hide each other; see pass_time.pass_seconds
    overlap: float = USUAL_OVERLAP
    load_s: float = 0.0  # seconds that loading took
    quick: bool = False  # whether this comes from the quick measurement at the first start
    busy: float = 0.0  # share of the time in which other programs kept the processor busy; see `machine.busy`
    disks: int = 1  # that they were read from at the same time

    @property
    def disturbed(self) -> bool:
        """True if other programs disturbed the measurement, so that its times may be too long."""
        noisy = bool(self.spread) and statistics.median(self.spread) > _NOISY
        return noisy or self.busy > DISTURBED

    def on_disks(self, disks: int) -> PassProfile:
        """The profile for so many disks: without the rate of another number of them."""
        return self if self.disks == disks else replace(self, disks=disks, read_rate=0.0)


@dataclass(frozen=True)
class DraftProfile(Figures):
    """Measured draft steps of one drafter."""

    step: Curve  # seconds of one decode, by rows
    overhead: float = 1.0  # seconds to grow a tree, relative to those of its decodes
    quick: bool = False  # whether this comes from the quick measurement at the first start
    # share of the time in which other programs kept the processor busy; see `machine.busy`
    busy: float = 0.0

    @property
    def disturbed(self) -> bool:
        """True if other programs disturbed the measurement, so that its times may be too long."""
        return self.busy > DISTURBED


@dataclass(frozen=True)
class DiskProfile(Figures):
    """Measured speed of reading one file."""

    direct: float  # bytes per second of direct reads, as passes make them; 0 where direct reads do not work
    buffered: float  # bytes per second through a cold page cache
    # the fastest setting
    block_bytes: int
    threads: int
    # bytes per second that arrived while passes ran over streamed weights; 0 if none did yet
    streamed_rate: float = 0.0

    @property
    def speed(self) -> float:
        """Bytes per second that streaming can rely on."""
        return self.streamed_rate or self.direct or self.buffered


@dataclass(frozen=True)
class ExpertProfile(Figures):
    """The share of the experts needed by a model's texts that was in memory."""

    held: float  # the share of the experts that was in memory
    hit_rate: float  # the share of those needed that was


class ProfileStore:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "profiles"

    def require_writable(self) -> None:
        """Refuse to go on where nothing can be stored, although that is what somebody waits for.

        Raises:
            OutputError: nothing can be.
        """
        with writing_to(self.folder, "Allow writing there: the results are stored for later runs."):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as trial:
                trial.write(bytes(_PROFILE_BYTES))
                trial.flush()

    def passes(self, key: Key) -> PassProfile | None:
        return _read(self._path("pass", key), PassProfile.from_json)

    def drafts(self, key: Key) -> DraftProfile | None:
        """The draft steps of a drafter."""
        return _read(self._path("draft", key), DraftProfile.from_json)

    def yields(self, key: Key) -> TreeYields | None:
        """The yields of a pair's trees, greedy or sampled."""
        return _read(self._path("yield", key), TreeYields.from_json)

    def yields_at(self, keys: ProfileKeys, temperature: float) -> TreeYields | None:
        """The yields at any temperature, interpolated between greedy and sampled trees."""
        greedy, sampled = (self.yields(keys.yields(t)) for t in (0.0, 1.0))
        share = min(temperature, 1.0)
        if greedy is None or sampled is None:
            return sampled if share > 0.5 else greedy
        return greedy.interpolated(sampled, share)

    def disk(self, key: Key) -> DiskProfile | None:
        return _read(self._path("disk", key), DiskProfile.from_json)

    def put_reading(self, key: Key, measured: DiskProfile) -> DiskProfile:
        """Store how fast a disk reads without passes, beside the rate that passes found; returns both."""
        known = self.disk(key)
        disk = measured if known is None else replace(measured, streamed_rate=known.streamed_rate)
        self.put(key, disk)
        return disk

    def put_streamed_rate(self, key: Key, rate: float) -> None:
        """Store the bytes per second at which passes found a disk to read."""
        known = self.disk(key) or DiskProfile(0.0, 0.0, 0, 0)
        self.put(key, replace(known, streamed_rate=rate))

    def device(self, key: Key) -> DeviceProfile | None:
        return _read(self._path("device", key), DeviceProfile.from_json)

    def experts(self, model: str) -> ExpertProfile | None:
        """The hit rate of the experts of the model with this header fingerprint."""
        return _read(self._path("experts", {"model": model}), ExpertProfile.from_json)

    def put_experts(self, model: str, profile: ExpertProfile) -> None:
        """Store the hit rate of a model's experts."""
        self._put("experts", {"model": model}, profile.to_json())

    def products(self, key: Key) -> tuple[float, ...] | None:
        """Seconds of products for a byte of weights, for each of kernels.report.ROWS."""
        return _read(self._path("products", key), lambda figures: tuple(map(float, figures["seconds"])))

    def put_products(self, key: Key, seconds: Sequence[float]) -> None:
        """Store seconds of products for a byte of weights."""
        self._put("products", key, {"seconds": list(seconds)})

    def threads(self, key: Key) -> int | None:
        """The number of threads that was the fastest."""
        return _read(self._path("threads", key), lambda figures: int(figures["fastest"]))

    def put_threads(self, key: Key, fastest: int, seconds: Mapping[int, Mapping[int, float]]) -> None:
        """Store the fastest number of threads, and seconds of passes by threads and rows."""
        self._put("threads", key, {"fastest": fastest, "seconds": {n: dict(s) for n, s in seconds.items()}})

    def put(
        self, key: Key, profile: PassProfile | DraftProfile | DiskProfile | DeviceProfile | TreeYields
    ) -> None:
        """Store a measurement; if that fails, it is measured again next time."""
        kinds = {
            PassProfile: "pass",
            DraftProfile: "draft",
            DiskProfile: "disk",
            DeviceProfile: "device",
            TreeYields: "yield",
        }
        self._put(kinds[type(profile)], key, profile.to_json())

    def _put(self, kind: str, key: Key, figures: Mapping[str, Any]) -> None:
        record = {
            "version": _VERSION,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "of": dict(key),
            "figures": figures,
        }
        save_json(self._path(kind, key), record, indent=1)

    def preferred_passes(self, model: str, threads: int, *, streams: bool) -> PassProfile | None:
        """The passes of a model that were measured here most carefully, and with its weights held so.

        Args:
            model: its fingerprint.
            streams: whether its weights are streamed.
        """
        known = self.all_passes(**machine_identity(), threads=str(threads), model=model)
        return min(
            # Streamed passes are padded, so they do not show what few rows take in memory.
            (profile for profile in known if streams or not profile.streamed),
            key=lambda profile: (profile.disturbed, profile.quick, profile.streamed != streams),
            default=None,
        )

    def all_passes(self, **wanted: str) -> Iterator[PassProfile]:
        """The passes of every target whose key has these values; without workers, unless they name some."""
        for path in sorted(self.folder.glob("pass-*.json")):
            known = read_json(path, lambda record: dict(record["of"])) or {}
            own = "workers" in wanted or "workers" not in known
            profile = _read(path, PassProfile.from_json)
            if own and profile is not None and wanted.items() <= known.items():
                yield profile

    def _path(self, kind: str, key: Key) -> Path:
        identity = json.dumps([_VERSION, sorted(key.items())])
        return self.folder / f"{kind}-{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}.json"


def _read(path: Path, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    return read_json(path, lambda record: parse(record["figures"]) if record["version"] == _VERSION else None)
