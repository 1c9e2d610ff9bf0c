"""A slow network on one machine: ports of the loopback that pass everything on after a delay."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

_PIECE = 1 << 16


class DelayedPort:
    """A port of the loopback that passes everything on to another one, late and not too fast.

    It knows nothing of the windows that TCP begins with, so on a real network of the same delay, large
    messages after a pause take longer.

    Args:
        rate: bytes a second, each way; None for as many as this machine manages.

    Attributes:
        address: "host:port".
    """

    def __init__(self, target: str, round_trip_s: float, rate: float | None = None) -> None:
        host, _, port = target.partition(":")
        self._target = host, int(port)
        self._delay_s = round_trip_s / 2
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        """Pass on both directions of a connection until both have ended."""
        with near, far:
            threads = []
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
                threads.append(threading.Thread(target=self._read, args=(source, pieces), daemon=True))
                threads.append(threading.Thread(target=self._write, args=(sink, pieces), daemon=True))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        data, free_at = b"-", 0.0
        while data:
            with contextlib.suppress(OSError):
                data = b""
                data = source.recv(_PIECE)
            free_at = max(free_at, time.perf_counter()) + (len(data) / self._rate if self._rate else 0.0)
            pieces.put((free_at + self._delay_s, data))

    def _write(self, sink: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = pieces.get()
                time.sleep(max(0.0, due - time.perf_counter()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)  # closing would wait for the thread that reads from it
                    return
                sink.sendall(data)
