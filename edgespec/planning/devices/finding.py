"""Finding and measuring this machine's graphics cards, and whatever else ggml can give layers to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.base.option import named
from edgespec.base.progress import Progress, no_progress
from edgespec.base.units import readable
from edgespec.config import AUTO, NONE, DevicesConfig
from edgespec.costs.curves import Curve
from edgespec.errors import BackendError, InconclusiveTrial, StreamError, UsageError
from edgespec.kernels.device_speed import DeviceFailed, measure_speeds
from edgespec.llama.build import SHARED_GPU, BuildDevice, current_build
from edgespec.machine.contention import ContentionWatch
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import Key, ProfileStore, disk_key, machine_identity

UNPINNED = (
    "Memory for transfers to the card cannot be pinned, which makes them slower: "
    "raise the limit of locked memory (ulimit -l)."
)
_DISK_S = 1.0  # to measure a disk


def find_devices(names: Sequence[str]) -> tuple[BuildDevice, ...]:
    """The devices of these names; all that there are, if there are no names.

    Raises:
        UsageError: there is none of a name.
    """
    there = current_build().gpus
    known = {device.name: device for device in there}
    for name in names:
        if name not in known:
            listed = ", ".join(f"{device.name} ({device.description})" for device in there)
            raise UsageError(
                f"There is no device '{name}' here.",
                f"Devices: {listed}." if there else _why_none(f"Leave out {named('device')}"),
            )
    return tuple(known[name] for name in names) or there


@dataclass(frozen=True)
class PlacementRequest:
    """A request to place layers, and the drafter, on devices of this machine."""

    devices: DevicesConfig  # the options
    n_threads: int  # threads that the processor computes with
    store: ProfileStore  # what was measured of devices
    on_progress: Progress = no_progress
    notes: list[str] = field(default_factory=list)  # sentences on what was found
    read_rate: float = 1e9  # bytes of weights that the disk reads per second

    @property
    def layers(self) -> int | str:
        """Layers of the target: "auto", "all", "attention" or a number."""
        return self.devices.layers_here

    def wanted(self, total: int) -> int:
        """The number of the target's layers to place, of so many; only if that is not left to the plan."""
        assert self.layers != AUTO
        return total if isinstance(self.layers, str) else min(self.layers, total)

    @property
    def drafter(self) -> str:
        """The device for the drafter: "auto", "none" or a name."""
        return self.devices.drafter_here

    @property
    def places_drafters(self) -> bool:
        """False where no drafter may be on a device; without layers there, only one that was named may."""
        return self.drafter != NONE and (self.layers != 0 or self.drafter != AUTO)


def open_cards(files: ModelFiles, request: PlacementRequest) -> Cards | None:
    """The cards that may hold layers of the target or the drafter, measured; None if there are none.

    Raises:
        UsageError: layers were asked for, and there is no device; or there is none of a name.
        BackendError: llama.cpp fails with a device that was asked for, or could not be tried with it.
    """
    if request.layers == 0 and not request.devices.requires_gpu:
        return None
    there = find_devices(request.devices.names)
    if request.drafter not in (AUTO, NONE, *(device.name for device in there)):
        there += find_devices([request.drafter])
    if not there:
        if request.devices.requires_gpu:
            why = "finds no GPU here" if current_build().offloads else "supports the processor only"
            raise UsageError(
                f"Cannot use a GPU: this llama.cpp build {why}.",
                _why_none(f"Leave out {named('gpu_layers')}"),
            )
        return None
    type_id = usual_type(files)
    cards = []
    for device in there:
        try:
            cards.append(measured(device, type_id, request))
        except DeviceFailed as error:
            if request.devices.requires_gpu or request.devices.names:
                raise BackendError(
                    f"llama.cpp cannot compute on {device.name} ({device.description}): its trial failed "
                    f"({error}).",
                    f"Update the card's driver, or use {named('gpu_layers', 0)}.",
                ) from error
            request.notes.append(f"{device.name} is not used: its trial failed ({error}).")
        except InconclusiveTrial as untried:
            if request.devices.requires_gpu or request.devices.names:
                raise
            request.notes.append(f"{device.name} is not used this time: {untried}")
    request.notes.extend(map(describe, cards))
    if any(not card.shared for card in cards):
        _measure_disk(files.paths[0], request)
    return Cards.of(cards, type_id) if cards else None


def _measure_disk(path: Path, request: PlacementRequest) -> None:
    """Measure the disk of a model once: weights may be read from there to be sent to a card."""
    if not path.exists() or request.store.disk(disk_key(path)) is not None:
        return
    from edgespec.measure.throughput import measure_reading

    with suppress(StreamError):  # whoever loads the model says what is wrong
        request.store.put_reading(disk_key(path), measure_reading(path, _DISK_S, request.on_progress))


def measured(device: BuildDevice, type_id: int, request: PlacementRequest) -> Card:
    """A device, with how fast it is: as stored, or measured now in a child process.

    Raises:
        DeviceFailed: llama.cpp cannot compute on it.
        InconclusiveTrial: whether it can was not found out.
    """
    key = _key(device, type_id, request.n_threads)
    profile = request.store.device(key)
    if profile is None:
        request.on_progress(f"Trying {device.name} (once)", 0.0)
        watch = ContentionWatch(request.n_threads)
        profile = measure_device(device.name, type_id, request.n_threads)
        if not watch.disturbed:
            request.store.put(key, profile)
    return Card(
        device.name, device.description, device.free, device.total, device.kind == SHARED_GPU, profile
    )


def measure_device(name: str, type_id: int, n_threads: int) -> DeviceProfile:
    """The speed of a device, measured in a child process.

    Raises:
        DeviceFailed, InconclusiveTrial: as `measured`.
    """
    own, there = measure_speeds(type_id, n_threads, names=[name])
    transfer = Curve.through(there.transfer.items())
    return DeviceProfile(there.seconds, own.seconds, transfer, there.unpinned)


def describe(card: Card) -> str:
    """A card and what was measured, in a sentence."""
    link = f"transfers run at {readable(card.profile.bandwidth)}/s"
    link += f" from pageable memory. {UNPINNED}" if card.profile.unpinned else "."
    ratios = [there / here for there, here in zip(card.seconds, card.profile.own_seconds, strict=True)]
    return (
        f"{card.name} ({card.description}) has {readable(card.free)} free of {readable(card.total)}. "
        f"Products take {ratios[0]:.2g} times as long there as on the processor with one row, and "
        f"{ratios[-1]:.2g} times with many; {link}"
    )


def with_type(cards: Cards, files: ModelFiles, request: PlacementRequest) -> Cards:
    """Cards, measured with the weights that most of another model has."""
    type_id = usual_type(files)
    if type_id == cards.type_id:
        return cards
    there = {device.name: device for device in current_build().gpus}
    try:
        again = [measured(there[card.name], type_id, request) for card in cards.devices]
    except (DeviceFailed, InconclusiveTrial, KeyError):
        return cards
    return Cards.of(
        [replace(new, free=old.free) for new, old in zip(again, cards.devices, strict=True)], type_id
    )


def _key(device: BuildDevice, type_id: int, n_threads: int) -> Key:
    return machine_identity() | {
        "device": f"{device.name} {device.description}",
        "type": str(type_id),
        "threads": str(n_threads),
    }


def _why_none(otherwise: str) -> str:
    return f"{otherwise}, or see 'edgespec doctor' for how to compile llama.cpp for a GPU."


def remember(
    store: ProfileStore, device: BuildDevice, type_id: int, n_threads: int, profile: DeviceProfile
) -> None:
    """Store what was measured of a device."""
    store.put(_key(device, type_id, n_threads), profile)
