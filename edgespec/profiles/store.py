"""What was measured on this machine, kept for the next run: small JSON files, one for each thing measured.

A file is named by what its figures depend on: the machine, the llama.cpp build, the model, the settings.
Where one of these changes, another file is meant, so nothing stale is ever read; a file that cannot be read
is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import psutil
from platformdirs import user_cache_path

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP
from edgespec.costs.yields import Yields
from edgespec.files.writing import atomic_write
from edgespec.machine.contention import DISTURBED
from edgespec.machine.cores import probe_cores

_VERSION = 2
_NOISY = 0.15  # half the distance between quartiles, as a share of the median
_T = TypeVar("_T")

Key = Mapping[str, str]


@dataclass(frozen=True)
class Keys:
    """What the figures of one pair on this machine are kept under.

    Attributes:
        passes, drafts: of target and drafter.
        target, drafter: what the models are known by.
        threads: CPU threads.
    """

    passes: Key
    drafts: Key
    target: str
    drafter: str
    threads: int

    @classmethod
    def of(cls, target: str, drafter: str, *, threads: int, mode: str) -> Keys:
        """For models with these header fingerprints.

        Args:
            drafter: may also be "lookup" or "none".
            mode: what else passes depend on: row rule, kernels, layers on a GPU.
        """
        machine = machine_identity() | {"threads": str(threads)}
        return cls(
            machine | {"model": target, "mode": mode},
            machine | {"model": drafter},
            target,
            drafter,
            threads,
        )

    def yields(self, temperature: float) -> Key:
        """For trees of this pair; what they yield does not depend on the machine."""
        return {"target": self.target, "drafter": self.drafter, "sampled": str(temperature > 0)}


def disk_key(path: Path) -> dict[str, str]:
    """For the disk that a file is on.

    Raises:
        OSError: there is no such file.
    """
    return {"host": platform.node(), "device": str(path.stat().st_dev)}


def machine_identity() -> dict[str, str]:
    """What figures of this machine depend on, besides models: processor, memory, llama.cpp build."""
    from edgespec.models.llama.runtime.backend import build_identity

    return {
        "machine": f"{platform.machine()} {probe_cores().model}",
        "memory": f"{round(psutil.virtual_memory().total / (1 << 30))} GiB",
        "build": build_identity(),
    }


@dataclass(frozen=True)
class PassProfile:
    """Passes of one target.

    Attributes:
        compute: seconds of a pass but for waiting for the disk, by rows.
        spread: of each point, half the distance between its quartiles, as a share of the median.
        accept_s: seconds of a round outside the pass and the draft.
        streamed: whether layers were streamed meanwhile.
        read_rate: bytes of weights that arrive from disk a second while a pass runs; 0 if none do.
        weight_bytes, parameters: the model's size.
        overlap: how well reading and arithmetic hide each other; see pass_time.pass_seconds.
        load_s: seconds from start to ready.
        quick: whether this was measured in a hurry.
        busy: share of the time in which other programs stood in the way; see hardware.busy.
    """

    compute: Curve
    spread: tuple[float, ...] = ()
    accept_s: float = 0.0
    streamed: bool = False
    read_rate: float = 0.0
    weight_bytes: int = 0
    parameters: int = 0
    overlap: float = USUAL_OVERLAP
    load_s: float = 0.0
    quick: bool = False
    busy: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other programs were in the way, so that the figures may be too slow."""
        noisy = bool(self.spread) and statistics.median(self.spread) > _NOISY
        return noisy or self.busy > DISTURBED

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        record = {k: v for k, v in vars(self).items() if k not in ("compute", "spread")}
        return record | {"compute": curve_to_json(self.compute), "spread": [round(s, 4) for s in self.spread]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PassProfile:
        """From a file."""
        return cls(
            curve_from_json(record["compute"]),
            tuple(float(s) for s in record["spread"]),
            float(record["accept_s"]),
            bool(record["streamed"]),
            float(record["read_rate"]),
            int(record["weight_bytes"]),
            int(record["parameters"]),
            float(record["overlap"]),
            float(record["load_s"]),
            bool(record["quick"]),
            float(record.get("busy", 0.0)),
        )


@dataclass(frozen=True)
class DraftProfile:
    """Draft steps of one drafter.

    Attributes:
        step: seconds of its own decode, by rows.
        overhead: seconds of growing a tree over the seconds of its steps' decodes.
        quick: whether this was measured in a hurry.
    """

    step: Curve
    overhead: float = 1.0
    quick: bool = False

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {"step": curve_to_json(self.step), "overhead": self.overhead, "quick": self.quick}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DraftProfile:
        """From a file."""
        return cls(curve_from_json(record["step"]), float(record["overhead"]), bool(record["quick"]))


@dataclass(frozen=True)
class DiskProfile:
    """Reading one file.

    Attributes:
        direct: bytes a second past the page cache, the best found; 0 where that does not work.
        buffered: bytes a second through the page cache, cold.
        block_bytes, threads: with which the best was found.
    """

    direct: float
    buffered: float
    block_bytes: int
    threads: int

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DiskProfile:
        """From a file."""
        return cls(
            float(record["direct"]),
            float(record["buffered"]),
            int(record["block_bytes"]),
            int(record["threads"]),
        )

    @property
    def speed(self) -> float:
        """Bytes a second that a stream can count on."""
        return self.direct or self.buffered


class ProfileStore:
    """The files."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or user_cache_path("edgespec") / "profiles"

    def passes(self, key: Key) -> PassProfile | None:
        """Passes of a target."""
        return _read(self._path("pass", key), PassProfile.from_json)

    def drafts(self, key: Key) -> DraftProfile | None:
        """Steps of a drafter."""
        return _read(self._path("draft", key), DraftProfile.from_json)

    def yields(self, key: Key) -> Yields | None:
        """What trees of a pair yield."""
        return _read(self._path("yield", key), Yields.from_json)

    def yields_at(self, keys: Keys, temperature: float) -> Yields | None:
        """The same at any temperature, between what greedy and sampled trees yield."""
        greedy, sampled = (self.yields(keys.yields(t)) for t in (0.0, 1.0))
        share = min(temperature, 1.0)
        if greedy is None or sampled is None:
            return sampled if share > 0.5 else greedy
        return greedy.interpolated(sampled, share)

    def disk(self, key: Key) -> DiskProfile | None:
        """How fast a disk is."""
        return _read(self._path("disk", key), DiskProfile.from_json)

    def threads(self, key: Key) -> int | None:
        """How many threads were the fastest."""
        return _read(self._path("threads", key), lambda figures: int(figures["fastest"]))

    def put_threads(self, key: Key, fastest: int, seconds: Mapping[int, Mapping[int, float]]) -> None:
        """Keep how many threads were the fastest, and what passes took by threads and rows."""
        self._put("threads", key, {"fastest": fastest, "seconds": {n: dict(s) for n, s in seconds.items()}})

    def put(self, key: Key, profile: PassProfile | DraftProfile | DiskProfile | Yields) -> None:
        """Keep what was measured; where that is not possible it is measured again next time."""
        kinds = {PassProfile: "pass", DraftProfile: "draft", DiskProfile: "disk", Yields: "yield"}
        self._put(kinds[type(profile)], key, profile.to_json())

    def _put(self, kind: str, key: Key, figures: Mapping[str, Any]) -> None:
        path = self._path(kind, key)
        record = {
            "version": _VERSION,
            "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "of": dict(key),
            "figures": figures,
        }
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, durable=False) as file:
                file.write(json.dumps(record, indent=1).encode())

    def all_passes(self, **wanted: str) -> Iterator[PassProfile]:
        """The passes of every target measured under keys that hold these values."""
        for path in sorted(self.folder.glob("pass-*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["version"] == _VERSION and wanted.items() <= record["of"].items():
                    yield PassProfile.from_json(record["figures"])

    def _path(self, kind: str, key: Key) -> Path:
        identity = json.dumps([_VERSION, sorted(key.items())])
        return self.folder / f"{kind}-{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}.json"


def curve_to_json(curve: Curve) -> list[list[float]]:
    """[rows, seconds] points."""
    return [[row, round(s, 7)] for row, s in zip(curve.rows, curve.seconds, strict=True)]


def curve_from_json(points: Any) -> Curve:
    """The curve through [rows, seconds] points."""
    return Curve.through((int(row), float(seconds)) for row, seconds in points)


def _read(path: Path, parse: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return parse(record["figures"]) if record["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
