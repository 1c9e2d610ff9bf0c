"""Measurements of a device that may hold layers, such as a graphics card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.costs.curves import Curve
from edgespec.profiles.curve_json import curve_from_json, curve_to_json


@dataclass(frozen=True)
class DeviceProfile:
    """Measured products and transfers on a device of this machine.

    Attributes:
        seconds: for a byte of weights as they are in files, for each of kernels.report.ROWS.
        own_seconds: the same on the processor.
        transfer: seconds in which so many bytes get there and back.
    """

    seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]
    transfer: Curve

    @property
    def bandwidth(self) -> float:
        """Bytes per second between memory and the device, one way, for large transfers."""
        return 2 * self.transfer.rows[-1] / max(self.transfer.seconds[-1], 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        return {
            "seconds": list(self.seconds),
            "own_seconds": list(self.own_seconds),
            "transfer": curve_to_json(self.transfer),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DeviceProfile:
        """Restore from the result of `to_json`."""
        return cls(
            tuple(float(s) for s in record["seconds"]),
            tuple(float(s) for s in record["own_seconds"]),
            curve_from_json(record["transfer"]),
        )
