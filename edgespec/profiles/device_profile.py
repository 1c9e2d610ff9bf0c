"""Measurements of a device that may hold layers, such as a graphics card."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.costs.curves import Curve
from edgespec.profiles.figures import Figures


@dataclass(frozen=True)
class DeviceProfile(Figures):
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
