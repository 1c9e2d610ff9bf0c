"""The layers of a model on this machine's processor, and on devices, which were measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from edgespec.costs.layer_assignment import RemotePart
from edgespec.kernels.layouts import measured_products
from edgespec.kernels.report import ROWS
from edgespec.models.gguf.experts import multiplied
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import TensorInfo
from edgespec.planning.devices.cards import Card
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.profiles.store import ProfileStore, disk_key

if TYPE_CHECKING:
    from edgespec.workers.pool import LentDevice

    LayerDevice = Card | LentDevice

CLEARLY_FASTER = 1.15  # times the processor's speed, from which a device gets layers that memory has room for
USUAL_ROWS = 8  # of the passes for which layers are spread

FEED_FORWARD = re.compile(r"blk\.\d+\.ffn_(up|gate|down|gate_up)(_exps)?\.weight")
"""Matrices that a layer multiplies its rows by after attention; of a mixture, those of its experts."""

_USUAL_RATE = 2e9  # bytes per second that a disk reads, until that is measured
_LAYER_DESCRIPTION = 11 << 10  # bytes that tell a worker what to compute for a layer
_ROW_MASK = 1 << 10  # bytes that tell a device which cells a row sees, in a text of usual length

_Device = TypeVar("_Device")


class LayerDevices(Protocol):
    """Devices that were measured together: `Cards`, or a `WorkerPool`.

    Attributes:
        devices: in order.
        own_seconds: what this machine's processor takes for a byte of weights as they are in files, for each
            of kernels.report.ROWS.
        remote: whether they are other machines, which are told in every pass what to compute.
    """

    @property
    def devices(self) -> Sequence[LayerDevice]: ...
    @property
    def own_seconds(self) -> tuple[float, ...]: ...
    @property
    def remote(self) -> bool: ...


@dataclass(frozen=True)
class DevicePart(Generic[_Device]):
    """The part of a model on one device."""

    device: _Device
    layers: int  # how many
    kept: int  # of them, those whose feed-forward weights are not there
    tensors: tuple[TensorInfo, ...]  # weights that are

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights there."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def used_bytes(self, used: Mapping[str, float]) -> float:
        """Bytes that a pass computes with there.

        Args:
            used: of all weights, by name.
        """
        return sum(used.get(tensor.name, 0.0) for tensor in self.tensors)


@dataclass(frozen=True)
class LayerAssignment:
    """The number of layers on each device."""

    here: int  # layers on this machine's processor, in memory or streamed; the first ones
    counts: tuple[int, ...]  # layers on each device
    names: frozenset[str] = frozenset()  # of weights on devices
    lent_bytes: int = 0  # of these weights
    kept: int = 0  # layers on devices whose feed-forward weights stay here; the first of these layers
    kept_names: tuple[str, ...] = ()  # of the weights that stay
    where: str = ""  # all of it in words
    key: str = ""  # all of it for keys of what depends on it
    output: bool = False  # whether the output is on a device too

    @classmethod
    def of(cls, files: ModelFiles, here: int, counts: Sequence[int], kept: int = 0) -> LayerAssignment:
        layers = layer_tensors(files)[here:]
        stays = tuple(t.name for layer in layers[:kept] for t in layer if FEED_FORWARD.fullmatch(t.name))
        there = [t for layer in layers for t in layer if t.name not in {*stays}]
        names = frozenset(t.name for t in there)
        return cls(here, tuple(counts), names, sum(t.n_bytes for t in there), kept, stays)

    @property
    def elsewhere(self) -> int:
        return sum(self.counts)

    def left(self, needs: MemoryNeeds) -> MemoryNeeds:
        """The needs of this machine's memory.

        Args:
            needs: as if everything were on this machine's processor.
        """
        target, *drafters = needs.footprints
        cache = round(target.cache * self.here / max(self.here + self.elsewhere, 1))
        target = replace(target, weights=target.weights - self.lent_bytes, cache=cache)
        return replace(needs, footprints=[target, *drafters])

    def used(self, devices: Sequence[_Device]) -> list[tuple[_Device, int]]:
        """The devices that hold layers, each with how many."""
        return [(device, count) for device, count in zip(devices, self.counts, strict=True) if count]

    def parts(self, devices: Sequence[_Device], files: ModelFiles) -> list[DevicePart[_Device]]:
        """The part of a model on each device that holds layers."""
        layers, found, start = layer_tensors(files), [], self.here
        for device, count in self.used(devices):
            there = (t for layer in layers[start : start + count] for t in layer if t.name in self.names)
            kept = max(min(self.here + self.kept - start, count), 0)
            found.append(DevicePart(device, count, kept, tuple(there)))
            start += count
        return found


def in_words(here: int, counts: Sequence[int], names: Sequence[str]) -> str:
    """The places of layers, in words."""
    used = [(count, name) for count, name in zip(counts, names, strict=True) if count]
    return ", ".join([f"{here} here", *(f"{count} on {name}" for count, name in used)])


def room_here(needs: MemoryNeeds, files: ModelFiles, room: int) -> tuple[int, int]:
    """Bytes of the largest layer with its keys and values, and what there is for layers in memory.

    Args:
        needs: as if everything were on this machine.
        room: bytes that this machine may use.
    """
    sizes = layer_sizes(files)
    first = needs.footprints[0]
    cells = first.cache // max(len(sizes), 1)
    others = needs.process + sum(f.total for f in needs.footprints[1:])
    beside = first.weights - sum(sizes)  # embeddings and output stay here
    return max(sizes, default=0) + cells, room - others - first.buffers - beside


def transfer_seconds(device: LayerDevice, n_bytes: float) -> float:
    """Seconds in which activations of so many bytes get to a device and back."""
    return max(device.transfer.at(n_bytes), device.ping_s)


def remote_parts(assignment: LayerAssignment, devices: LayerDevices, files: ModelFiles) -> list[RemotePart]:
    """Time per pass on each device that holds layers, transfers included."""
    used = used_bytes(files)
    total = sum(used.values())
    own = [seconds * _kernel_share(usual_type(files), at) for at, seconds in enumerate(devices.own_seconds)]
    row, found = hidden_bytes(files) + _ROW_MASK, []
    for part in assignment.parts(devices.devices, files):
        times = zip(ROWS, part.device.seconds, own, strict=True)
        slowness = {rows: there / here for rows, there, here in times}
        share = part.used_bytes(used) / total
        described = part.layers * _LAYER_DESCRIPTION if devices.remote else 0
        found.append(RemotePart(share, slowness, part.device.transfer, described, row, trips=1 + part.kept))
    return found


def layer_seconds(devices: LayerDevices, files: ModelFiles, rows: int = USUAL_ROWS) -> list[float]:
    """Seconds of a pass over one layer of usual size: here, and then on each device."""
    sizes = layer_sizes(files)
    at = ROWS.index(rows)
    per_byte = [devices.own_seconds[at] * _kernel_share(usual_type(files), at)]
    per_byte += [device.seconds[at] for device in devices.devices]
    return [seconds * sum(sizes) / max(len(sizes), 1) for seconds in per_byte]


def _kernel_share(type_id: int, at: int) -> float:
    """The time that products take here relative to weights as they are in files, by the layout in use."""
    measured = measured_products(type_id)
    if measured is None:
        return 1.0
    in_use, plain = measured
    return in_use[at] / plain[at]


def usual_type(files: ModelFiles) -> int:
    """The quantization of most bytes of a model."""
    by_type: dict[int, int] = {}
    for header in files.headers:
        for tensor in header.tensors:
            if len(tensor.shape) > 1:
                by_type[tensor.type_id] = by_type.get(tensor.type_id, 0) + tensor.n_bytes
    return max(by_type, key=lambda type_id: by_type[type_id])


def layer_tensors(files: ModelFiles) -> list[list[TensorInfo]]:
    """The tensors of each layer: everything that is named after it."""
    found: dict[int, list[TensorInfo]] = {}
    for header in files.headers:
        for tensor in header.tensors:
            parts = tensor.name.split(".")
            if parts[0] == "blk" and parts[1].isdigit():
                found.setdefault(int(parts[1]), []).append(tensor)
    return [found[index] for index in sorted(found)]


def layer_sizes(files: ModelFiles) -> list[int]:
    return [sum(tensor.n_bytes for tensor in layer) for layer in layer_tensors(files)]


def output_bytes(files: ModelFiles) -> int:
    """Bytes of the matrix that makes logits: the output, or the embeddings where it is tied to them."""
    sizes = {tensor.name: tensor.n_bytes for header in files.headers for tensor in header.tensors}
    return sizes.get("output.weight", sizes.get("token_embd.weight", 0))


def used_bytes(files: ModelFiles) -> dict[str, float]:
    """Bytes of each matrix that a pass of `USUAL_ROWS` rows computes with: of experts, those it needs."""
    return {t.name: t.n_bytes * (1 - (1 - share) ** USUAL_ROWS) for t, share in multiplied(files)}


def hidden_bytes(files: ModelFiles) -> int:
    """Bytes of a row of activations between two layers."""
    header = files.headers[0]
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    return 4 * width if isinstance(width, int) else 0


def read_rate(files: ModelFiles, store: ProfileStore) -> float:
    """Bytes that the disk of a model reads per second, as far as that is known."""
    return known_read_rate(files, store) or _USUAL_RATE


def known_read_rate(files: ModelFiles, store: ProfileStore) -> float:
    """Bytes that the disk of a model reads per second; 0 if that was not measured."""
    if not files.paths[0].exists():  # planned from its header on the Hub
        return 0.0
    disk = store.disk(disk_key(files.paths[0]))
    return 0.0 if disk is None else disk.speed
