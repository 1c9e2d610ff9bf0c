"""A port of this machine that ggml takes for a worker, and that outlives it.

ggml ends the whole process when a worker is gone. So it is connected to a relay in this process, which passes
everything on. Once the worker is lost, the relay answers in its place with zeros; what is computed from them
is never used, as every decode asks the relay before and after.

ggml connects by TCP, and can show no token. So any program of this machine could connect, but only this
process is served.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from edgespec.errors import WorkerError
from edgespec.workers import protocol
from edgespec.workers.connection import WorkerConnection, receive
from edgespec.workers.protocol import HEADER, LENGTH, RPCCommand

_PIECE = 1 << 20
_AT_ONCE = 1 << 18  # a request up to this size is sent with its header
_LONGEST_S = 900.0  # for an answer: a pass over a long piece of a prompt on a slow machine
_LOOK_S = 0.5
_STOP_S = 20.0
_ZEROS = bytes(_PIECE)


def _is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """True if this process has the client's end of a connection between two addresses."""
    own = psutil.Process().net_connections("tcp4")
    return any(end.laddr == client and end.raddr == server for end in own)


@dataclass
class RelayTraffic:
    """The traffic of a relay.

    Attributes:
        sent, received: bytes to the worker and from it.
        answers: how many requests were waited for.
        sizing_s: seconds spent waiting for what tensors take there. ggml asks once for every number of rows.
    """

    sent: int = 0
    received: int = 0
    answers: int = 0
    sizing_s: float = 0.0


class Relay:
    """Passes ggml's requests on to a worker.

    Args:
        connection: taken over, and closed in the end.
        stopped: whether what waits for the worker is to end. A worker that has still not answered a while
            later counts as lost, as ggml cannot be interrupted.
        stop_s: how long that while is.

    Attributes:
        endpoint: what ggml connects to.
        traffic: counted from the start.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        stopped: Callable[[], bool] = lambda: False,
        stop_s: float = _STOP_S,
    ) -> None:
        self._stopped = stopped
        self._stop_s = stop_s
        self._address = connection.address
        self._version = connection.version
        self._worker = connection.socket
        self._worker.settimeout(_LONGEST_S)
        self._why = ""
        self._closing = False
        self._client: socket.socket | None = None
        self.traffic = RelayTraffic()
        self._scratch = memoryview(bytearray(_PIECE))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._work, name=f"relay-{self._address}", daemon=True)
        self._thread.start()

    def failure(self) -> WorkerError | None:
        """An error if the worker is lost, else None."""
        if not self._why:
            return None
        return WorkerError(
            f"The worker {self._address} is gone: {self._why}.",
            "Start it again, or continue without it; saved data is intact.",
        )

    def close(self) -> None:
        """End the connection, after ggml has freed what it held there."""
        self._closing = True
        # Either wakes the thread, which waits for a request or for a connection.
        with contextlib.suppress(OSError):
            if self._client is not None:
                self._client.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), 1.0).close()
        self._thread.join(5.0)
        self._listener.close()
        self._worker.close()

    def _work(self) -> None:
        """Serve one connection of ggml after another: it opens and closes several."""
        while not self._closing:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            if not _is_own(peer, client.getsockname()):
                client.close()
                continue
            self._client = client
            with client, contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._closing:
                    command, length = HEADER.unpack(receive(client, HEADER.size))
                    self._pass_on(client, command, length)

    def _pass_on(self, client: socket.socket, command: int, length: int) -> None:
        """Pass a request on, and its answer back."""
        if command == RPCCommand.HELLO:  # the worker has been greeted already, and greets once
            receive(client, length)
            answer = protocol.hello_answer(self._version)
            client.sendall(LENGTH.pack(len(answer)) + answer)
            return
        content = b""
        if length <= _AT_ONCE:
            content = receive(client, length)
            self._send(HEADER.pack(command, length) + content)
        else:
            self._send(HEADER.pack(command, length))
            self._stream(client, length)
        if not protocol.is_answered(command):
            return
        asked_at = time.perf_counter()
        is_answered = self._answer(client)
        if command == RPCCommand.ALLOCATED_SIZE:
            self.traffic.sizing_s += time.perf_counter() - asked_at
        if not is_answered:
            answer = protocol.stand_in(command, content)
            client.sendall(LENGTH.pack(len(answer)) + answer)

    def _send(self, data: bytes | memoryview) -> None:
        if self._why:
            return
        try:
            self._worker.sendall(data)
            self.traffic.sent += len(data)
        except OSError as error:
            self._lose(error)

    def _stream(self, client: socket.socket, length: int) -> None:
        """Pass on a long content, piece by piece; all of it is read even if the worker is lost."""
        while length:
            count = client.recv_into(self._scratch[: min(length, _PIECE)])
            if count == 0:
                raise ConnectionError("ggml closed the connection")
            self._send(self._scratch[:count])
            length -= count

    def _answer(self, client: socket.socket) -> bool:
        """Pass the worker's answer on; False if there is none. One that breaks off is filled with zeros."""
        if self._why:
            return False
        try:
            self._wait()
            header = receive(self._worker, LENGTH.size)
        except OSError as error:
            self._lose(error)
            return False
        self.traffic.answers += 1
        (length,) = LENGTH.unpack(header)
        self.traffic.received += LENGTH.size + length
        if length <= _AT_ONCE:  # most answers: sent at once
            content = self._rest(length)
            client.sendall(header + content)
            return True
        client.sendall(header)
        while length:
            piece = self._rest(min(length, _PIECE))
            client.sendall(piece)
            length -= len(piece)
        return True

    def _wait(self) -> None:
        """Wait for an answer, but not for long once nobody wants it; raises TimeoutError then."""
        asked_at, stopped_at = time.monotonic(), 0.0
        while not select.select([self._worker], [], [], min(_LOOK_S, self._stop_s))[0]:
            if not self._stopped():
                stopped_at = 0.0
            elif not stopped_at:
                stopped_at = time.monotonic()
            elif time.monotonic() - stopped_at > self._stop_s:
                raise TimeoutError
            if time.monotonic() > asked_at + _LONGEST_S:
                raise TimeoutError

    def _rest(self, n_bytes: int) -> bytes:
        """Read this many bytes of an answer; zeros from where the worker is lost."""
        if not self._why:
            try:
                return receive(self._worker, n_bytes)
            except OSError as error:
                self._lose(error)
        return _ZEROS[:n_bytes]

    def _lose(self, error: OSError) -> None:
        """Note that the worker is lost: before ggml gets zeros, so that nobody takes them for real."""
        if isinstance(error, TimeoutError):
            self._why = "it no longer answers"
        else:
            self._why = error.strerror or str(error) or "the connection broke"
