"""The workers of one model: connected, measured, and the devices that they lend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from edgespec.costs.curves import Curve
from edgespec.errors import BackendError, WorkerError
from edgespec.kernels.device_speed import DeviceFailed, measure_speeds
from edgespec.kernels.ggml import Address as Pointer
from edgespec.kernels.ggml import UnsupportedBuild, rpc
from edgespec.workers.address import WorkerAddress, is_guarded
from edgespec.workers.connection import WorkerConnection
from edgespec.workers.lending import REBUILD
from edgespec.workers.relay import Relay


@dataclass(frozen=True)
class LentDevice:
    address: WorkerAddress
    index: int  # among those of its worker
    free: int  # bytes of memory that may be used
    ping_s: float  # seconds of a round trip to the worker
    transfer: Curve  # seconds in which so many bytes get there and back
    seconds: tuple[float, ...] = ()  # for a byte of weights, for each of kernels.report.ROWS

    @property
    def name(self) -> str:
        """Name its worker, with a number if that lends several."""
        return f"{self.address}#{self.index}" if self.index else str(self.address)


class WorkerPool:
    """Connections to workers; closed in the end.

    Args:
        addresses: of the workers.
        type_id: ggml's number of the quantization that most of the model has.
        n_threads: this machine computes with.
        leave_out_missing: continue without those that do not answer.

    Attributes:
        devices: of all workers, in order.
        own_seconds: what this machine's processor takes for a byte of weights as they are in files, for each
            of kernels.report.ROWS.
        missing: why workers were left out.

    Raises:
        BackendError: this llama.cpp build has no RPC.
        WorkerError: a worker cannot be reached or used.
    """

    def __init__(
        self,
        addresses: Sequence[WorkerAddress],
        *,
        type_id: int,
        n_threads: int,
        leave_out_missing: bool = False,
    ) -> None:
        if not rpc.has_rpc():
            raise BackendError("This llama.cpp build cannot use workers: it has no RPC.", REBUILD)
        self.missing: list[WorkerError] = []
        self._connections: dict[WorkerAddress, WorkerConnection] = {}
        self._relays: dict[WorkerAddress, Relay] = {}
        there = []
        for address in addresses:
            try:
                WorkerConnection(address).close()
            except WorkerError as error:
                if not leave_out_missing:
                    raise
                self.missing.append(error)
            else:
                there.append(address)
        # A worker serves one client at a time, so this comes before the connections that stay.
        endpoints = [f"{address.resolved()}:{address.port}" for address in there]
        measured = _measured(endpoints, type_id, n_threads) if there else [()]
        self.own_seconds, seconds = measured[0], measured[1:]
        devices: list[LentDevice] = []
        with ExitStack() as stack:
            for address in there:
                connection, lent = _opened(address)
                stack.callback(connection.close)
                self._connections[address] = connection
                devices += lent
            stack.pop_all()
        self.devices = tuple(replace(d, seconds=s) for d, s in zip(devices, seconds, strict=True))

    @property
    def identity(self) -> str:
        """Their distance, roughly, for keys of what passes take."""
        return ",".join(f"{device.ping_s:.0e}" for device in self.devices)

    @property
    def unguarded(self) -> list[WorkerAddress]:
        """The workers that are in no private network."""
        return [a for a, c in self._connections.items() if not is_guarded(c.socket.getpeername()[0])]

    @property
    def remote(self) -> bool:
        """True if the devices are other machines: they are."""
        return True

    def borrow(self, stopped: Callable[[], bool]) -> tuple[Pointer, ...]:
        """ggml's devices, in the order of `devices`; from now on, workers that are lost are noticed.

        Args:
            stopped: whether what waits for a worker is to end.

        Raises:
            WorkerError: a worker was lost meanwhile.
        """
        found: list[Pointer] = []
        for address, connection in self._connections.items():
            relay = self._relays[address] = Relay(connection, stopped)
            try:
                found += rpc.connect(relay.endpoint)
            except UnsupportedBuild as error:
                raise BackendError(f"This llama.cpp build cannot use workers: {error}.", REBUILD) from error
        if (lost := self.lost()) is not None:
            raise lost
        return tuple(found)

    def lost(self) -> WorkerError | None:
        """An error if a worker is gone."""
        return next((e for relay in self._relays.values() if (e := relay.failure()) is not None), None)

    def sizing_s(self) -> float:
        """Total seconds that ggml has waited for workers to say what tensors take there."""
        return sum(relay.traffic.sizing_s for relay in self._relays.values())

    @property
    def relays(self) -> tuple[Relay, ...]:
        """The relays that ggml's requests go through, for measurements."""
        return tuple(self._relays.values())

    def close(self) -> None:
        """End all connections, after ggml has freed what it held there; a second call does nothing."""
        relays, self._relays = self._relays, {}
        connections, self._connections = self._connections, {}
        for relay in relays.values():
            relay.close()
        for connection in connections.values():
            connection.close()


def _measured(endpoints: Sequence[str], type_id: int, n_threads: int) -> list[tuple[float, ...]]:
    """Seconds for a byte of weights: on this machine's processor, and on each device of the workers."""
    try:
        speeds = measure_speeds(type_id, n_threads, endpoints=endpoints)
    except DeviceFailed as error:
        raise WorkerError(
            f"llama.cpp cannot compute on the workers {', '.join(endpoints)}: their trial failed ({error}).",
            "Check their output, and install the same version of EdgeSpec everywhere.",
        ) from error
    return [speed.seconds for speed in speeds]


def _opened(address: WorkerAddress) -> tuple[WorkerConnection, list[LentDevice]]:
    """A connection to a worker, its devices, and what transfers to it take."""
    connection = WorkerConnection(address)
    try:
        count = connection.devices()
        ping_s = connection.ping_s()
        transfer = Curve.through(connection.transfers().items())
        first = LentDevice(address, 0, 0, ping_s, transfer)
        return connection, [replace(first, index=i, free=connection.memory(i)[0]) for i in range(count)]
    except BaseException:
        connection.close()
        raise
