"""Measurements as JSON, and those of a device: curves by their points, everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from edgespec.costs.curves import Curve

_ADDED_LATER = ("busy", "streamed_rate", "disks", "unpinned")  # older files have none
_READ: Mapping[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "tuple[float, ...]": lambda values: tuple(map(float, values)),
    "Curve": lambda points: Curve.through((int(row), float(seconds)) for row, seconds in points),
}


class Figures:
    """A dataclass whose fields are figures."""

    def to_json(self) -> dict[str, Any]:
        return {name: _written(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Restore from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        known = [
            field
            for field in fields(cls)  # type: ignore[arg-type]
            if field.name in record or field.name not in _ADDED_LATER
        ]
        return cls(**{field.name: _READ[str(field.type)](record[field.name]) for field in known})


def _written(value: Any) -> Any:
    if isinstance(value, Curve):
        return [[row, round(s, 7)] for row, s in zip(value.rows, value.seconds, strict=True)]
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class DeviceProfile(Figures):
    """Measured products and transfers on a device of this machine."""

    seconds: tuple[float, ...]  # for a byte of weights as they are in files, for each of kernels.report.ROWS
    own_seconds: tuple[float, ...]  # the same on the processor
    transfer: Curve  # seconds in which so many bytes get there and back
    unpinned: bool = False  # whether no memory could be pinned for it, although it has such memory

    @property
    def bandwidth(self) -> float:
        """Bytes per second between memory and the device, one way, for large transfers."""
        return 2 * self.transfer.rows[-1] / max(self.transfer.seconds[-1], 1e-9)
