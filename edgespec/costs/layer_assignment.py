"""The layers of each device, where several lend their memory to one model.

Devices are this machine's processor, its graphics cards, other machines, and the disk behind the processor.
A pass goes through them one after another, so its time is the sum of what its layers take wherever
they are, and of transfers to each device and back. Whichever machine is fastest therefore gets as many layers
as it holds; and a machine that is not needed and not faster gets none, as transfers cost time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from edgespec.costs.curves import Curve


@dataclass(frozen=True)
class DeviceCapacity:
    """A device that may hold layers."""

    room: int  # bytes for layers, and for their keys and values
    layer_s: float  # seconds that a pass takes for one layer there
    way_s: float = 0.0  # seconds to get there and back; 0 for this machine


def assign_layers(layers: int, layer_bytes: int, devices: Sequence[DeviceCapacity]) -> tuple[int, ...] | None:
    """The number of layers for each device, so that a pass takes the least time; None if they do not fit.

    Args:
        layers: how many there are.
        layer_bytes: of the largest, with its keys and values.
        devices: this machine, and then the others, of which there should be no more than a dozen.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    others = range(1, len(devices))
    for count in range(len(devices)):
        for used in combinations(others, count):
            counts = fill_devices(layers, layer_bytes, devices, (0, *used))
            if sum(counts) < layers:
                continue
            taken = pipeline_seconds(counts, devices)
            if best is None or taken < best[0]:
                best = taken, counts
    return None if best is None else best[1]


def pipeline_seconds(counts: Sequence[int], devices: Sequence[DeviceCapacity]) -> float:
    """Seconds of a pass through layers that are spread so."""
    return sum(
        count * device.layer_s + device.way_s for count, device in zip(counts, devices, strict=True) if count
    )


def fill_devices(
    layers: int, layer_bytes: int, devices: Sequence[DeviceCapacity], used: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The fastest of the devices filled first, with as many layers as they hold.

    Args:
        used: the numbers of the devices that may be; None for all.
    """
    counts = [0] * len(devices)
    for index in sorted(range(len(devices)) if used is None else used, key=lambda at: devices[at].layer_s):
        counts[index] = min(layers - sum(counts), max(devices[index].room, 0) // max(layer_bytes, 1))
    return tuple(counts)


@dataclass(frozen=True)
class RemotePart:
    """Layers on another machine."""

    share: float  # of the bytes that a pass computes with
    slowness: Mapping[int, float]  # the time that products take there relative to this machine, by rows
    transfer: Curve  # seconds in which so many bytes get there and back
    # that describe a pass of another shape than the last one. Trees vary; single rows do not.
    pass_bytes: float
    row_bytes: float  # that every row adds, in each direction
    trips: int = 1  # how often a pass goes there and back

    def seconds(self, rows: int, here_s: float) -> float:
        """Seconds of a pass in this part.

        Args:
            here_s: seconds of the whole pass, if all of it were computed on this machine.
        """
        slower = float(np.interp(rows, list(self.slowness), list(self.slowness.values())))
        # Transfers were measured with as many bytes in both directions; what describes the pass goes in one.
        described = self.pass_bytes / 2 if rows > 1 else 0.0
        trip_s = self.transfer.at(described + rows * self.row_bytes)
        return self.share * here_s * slower + self.trips * trip_s


def curve_over_machines(here: Curve, parts: Sequence[RemotePart]) -> Curve:
    """Seconds of passes by rows, where parts of the model are on other machines.

    Args:
        here: of the whole model on this machine.
    """
    if not parts:
        return here
    rest = 1 - sum(part.share for part in parts)
    sizes = {*here.rows, *(rows for part in parts for rows in part.slowness if rows > here.rows[0])}
    return Curve.through(
        (rows, rest * here.at(rows) + sum(part.seconds(rows, here.at(rows)) for part in parts))
        for rows in map(int, sizes)
    )
