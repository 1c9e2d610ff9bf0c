"""A connection to a worker: opened with limits on time, and asked what the worker is and how far away."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Sequence

from edgespec.errors import WorkerError
from edgespec.workers import protocol
from edgespec.workers.address import WorkerAddress
from edgespec.workers.protocol import HEADER, LENGTH, RPCCommand

_REACH_S = 5.0  # to be reached, and to greet
_QUESTION_S = 60.0
_PINGS = 7
_PAYLOADS = (1 << 14, 1 << 17, 1 << 20)  # bytes: a row, a small tree and a large one of usual models
_SLOW_S = 0.25  # if a payload took longer, no larger one is tried

# A machine that was switched off says nothing. These find out within half a minute.
_ALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,
}


class WorkerConnection:
    """A connection to a worker that speaks a protocol that is understood here.

    Args:
        reach_s: how long the worker may take to be reached, and to greet.

    Attributes:
        address: of the worker.
        socket: the connection itself.
        version: of the worker's protocol.

    Raises:
        WorkerError: nobody listens there, or somebody who is no worker, or who is busy; or the version is
            another one.
    """

    def __init__(self, address: WorkerAddress, reach_s: float = _REACH_S) -> None:
        self.address = address
        try:
            self.socket = socket.create_connection((address.resolved(), address.port), reach_s)
        except OSError as error:
            reason = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise WorkerError(
                f"The worker {address} cannot be reached: {reason}.",
                "Start one there: edgespec worker --listen ADDRESS:PORT",
            ) from error
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._watch_for_silence()
            self.version = self._greet()
            self.socket.settimeout(_QUESTION_S)
        except BaseException:
            self.close()
            raise

    def devices(self) -> int:
        """Number of devices that the worker lends."""
        return int(struct.unpack("<I", self._ask(RPCCommand.DEVICES))[0])

    def memory(self, device: int) -> tuple[int, int]:
        """Bytes of a device's memory: free, and all of it."""
        free, total = struct.unpack("<QQ", self._ask(RPCCommand.MEMORY, struct.pack("<I", device)))
        return free, total

    def ping_s(self) -> float:
        """Seconds of a round trip, the median of a few."""
        return statistics.median(self._timed_ping() for _ in range(_PINGS))

    def transfers(self, payloads: Sequence[int] = _PAYLOADS) -> dict[int, float]:
        """Seconds in which so many bytes go to the worker's first device and come back.

        The first of a few tries counts too: a connection that has been idle begins slowly, as it does in
        every pass.
        """
        found: dict[int, float] = {}
        reply = self._ask(RPCCommand.ALLOCATE, struct.pack("<IQ", 0, max(payloads)))
        buffer, _ = struct.unpack("<QQ", reply)
        if not buffer:
            raise WorkerError(f"The worker {self.address} has no memory left.", "Close its other users.")
        (base,) = LENGTH.unpack(self._ask(RPCCommand.BASE, LENGTH.pack(buffer)))
        for n_bytes in payloads:
            tensor = protocol.numbers_at(buffer, base, n_bytes // 4)
            taken = []
            for _ in range(3):
                begun = time.perf_counter()
                self._tell(RPCCommand.SET, protocol.set_content(tensor, bytes(n_bytes)))
                self._ask(RPCCommand.GET, protocol.get_content(tensor, n_bytes))
                taken.append(time.perf_counter() - begun)
            found[n_bytes] = statistics.median(taken)
            if taken[-1] > _SLOW_S:
                break
        self._tell(RPCCommand.FREE, LENGTH.pack(buffer))
        return found

    def close(self) -> None:
        """End the connection; the worker then frees what it held for it."""
        self.socket.close()

    def __enter__(self) -> WorkerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self) -> tuple[int, int, int]:
        try:
            self.socket.sendall(
                HEADER.pack(RPCCommand.HELLO, len(protocol.HELLO_CONTENT)) + protocol.HELLO_CONTENT
            )
            answer = self._answer(most=64)
        except TimeoutError as error:
            raise WorkerError(
                f"Worker {self.address} does not respond.",
                "It serves one program at a time: close the other one, or wait for it.",
            ) from error
        except OSError as error:
            raise self._no_worker() from error
        if len(answer) < 4:
            raise self._no_worker()
        version = protocol.version_of(answer)
        if version[0] != protocol.MAJOR_VERSION:
            raise WorkerError(
                f"The worker {self.address} speaks version {version[0]} of llama.cpp's RPC protocol, but "
                f"version {protocol.MAJOR_VERSION} is understood here.",
                "Install the same version of EdgeSpec on both machines.",
            )
        return version

    def _no_worker(self) -> WorkerError:
        return WorkerError(
            f"{self.address} is not a worker.", "Name the address that 'edgespec worker' shows."
        )

    def _timed_ping(self) -> float:
        begun = time.perf_counter()
        self._ask(RPCCommand.DEVICES)
        return time.perf_counter() - begun

    def _tell(self, command: RPCCommand, content: bytes) -> None:
        try:
            self.socket.sendall(HEADER.pack(command, len(content)) + content)
        except OSError as error:
            raise self._gone(error) from error

    def _ask(self, command: RPCCommand, content: bytes = b"") -> bytes:
        self._tell(command, content)
        try:
            return self._answer()
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> WorkerError:
        return WorkerError(
            f"The worker {self.address} is gone: {error.strerror or error}.", "Check its output."
        )

    def _answer(self, most: int = 1 << 30) -> bytes:
        (length,) = LENGTH.unpack(receive(self.socket, LENGTH.size))
        if length > most:
            raise ConnectionError("the answer is invalid")
        return receive(self.socket, length)

    def _watch_for_silence(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE_OPTIONS.items():
            if hasattr(socket, name):  # not on every system
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive(source: socket.socket, n_bytes: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        ConnectionError: the other end closed the connection first.
        OSError: as of sockets.
    """
    data = bytearray(n_bytes)
    view, filled = memoryview(data), 0
    while filled < n_bytes:
        count = source.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the connection was closed")
        filled += count
    return bytes(data)
