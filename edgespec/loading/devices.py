"""The devices that a load may use, after some have failed in this process."""

from __future__ import annotations

from edgespec.config import AUTO, NONE, Config
from edgespec.llama.build import current_build
from edgespec.llama.runtime.device_failures import lost_devices, shortages


def with_devices_left(config: Config) -> Config:
    """The configuration without devices that are lost; without any, if no other one may be used.

    A drafter may be what a card had no memory for. After that, it is on a card only if it was asked for.
    """
    devices, lost = config.devices, lost_devices()
    if shortages() and devices.draft_device == AUTO:
        config = config.with_(draft_device=NONE)
    if not lost:
        return config
    names = tuple(name for name in devices.names if name not in lost)
    if devices.draft_device in lost:
        config = config.with_(draft_device=NONE)
    if names or (current_build().gpus and not devices.names):
        return config.with_(device=names)
    return config.with_(device=(), gpu_layers=0, draft_device=NONE)
