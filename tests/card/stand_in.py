"""A worker's device in the place of a card, measured, where there is no card."""

from __future__ import annotations

import os

from edgespec.costs.curves import Curve
from edgespec.kernels.device_speed import measure_speeds
from edgespec.llama.build import current_build
from edgespec.machine.cores import default_threads
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.finding import remember
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import ProfileStore
from tests.card.device import STAND_IN


def measure_stand_in(model: str) -> None:
    """Measure the worker's device with the type that most of a model has; a child could not name it."""
    (device,) = current_build().gpus
    type_id = usual_type(ModelFiles.of(read_header(model)))  # type: ignore[arg-type]
    own, there = measure_speeds(type_id, default_threads(), endpoints=[os.environ[STAND_IN]])
    transfer = Curve.through([(1 << 14, 1e-4), (1 << 20, 1e-3)])
    remember(
        ProfileStore(),
        device,
        type_id,
        default_threads(),
        DeviceProfile(there.seconds, own.seconds, transfer),
    )
