"""Addresses, the relay, and how layers are spread: all that needs no second machine."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.costs.curves import Curve
from edgespec.costs.layer_assignment import (
    DeviceCapacity,
    RemotePart,
    assign_layers,
    curve_over_machines,
    pipeline_seconds,
)
from edgespec.errors import UsageError, WorkerError
from edgespec.profiles.store import PassProfile, ProfileKeys, ProfileStore
from edgespec.workers import protocol
from edgespec.workers.address import WorkerAddress, is_guarded, parse_addresses
from edgespec.workers.connection import WorkerConnection, receive
from edgespec.workers.protocol import HEADER, LENGTH, RPCCommand
from edgespec.workers.relay import Relay
from tests.waiting import PATIENCE_S
from tests.wine import needs_owners


def test_addresses() -> None:
    assert str(WorkerAddress.parse(" pc.local:50053 ")) == "pc.local:50053"
    assert WorkerAddress.parse("192.168.0.7") == WorkerAddress("192.168.0.7", 50052)
    assert parse_addresses("a:1, b:2,") == (WorkerAddress("a", 1), WorkerAddress("b", 2))


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a:70000", "a:-1", "a b:1", "[::1]:5"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a worker"):
        WorkerAddress.parse(text)


def test_lists_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="named twice"):
        parse_addresses("a:1,a:1")
    with pytest.raises(UsageError, match="port 0"):
        parse_addresses("a:0")


def test_guarded_addresses() -> None:
    assert all(map(is_guarded, ["127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.9", "192.168.1.1"]))
    assert not any(map(is_guarded, ["0.0.0.0", "8.8.8.8", "172.32.0.1", "100.64.0.1"]))


places = st.builds(DeviceCapacity, st.integers(0, 40), st.floats(0.001, 1), st.floats(0, 2))


@given(st.integers(1, 12), st.integers(1, 9), st.lists(places, min_size=1, max_size=4))
def test_no_other_spread_is_faster(layers: int, size: int, machines: list[DeviceCapacity]) -> None:
    machines[0] = replace(machines[0], way_s=0.0)

    def every(left: int, at: int) -> Iterator[tuple[int, ...]]:
        room = machines[at].room // size
        if at == len(machines) - 1:
            if left <= room:
                yield (left,)
            return
        for count in range(min(left, room) + 1):
            yield from ((count, *rest) for rest in every(left - count, at + 1))

    possible = list(every(layers, 0))
    chosen = assign_layers(layers, size, machines)
    if not possible:
        assert chosen is None
        return
    assert chosen in possible
    fastest = min(pipeline_seconds(counts, machines) for counts in possible)
    assert pipeline_seconds(chosen, machines) == pytest.approx(fastest)


def test_a_machine_that_is_not_needed_and_not_faster_gets_nothing() -> None:
    assert assign_layers(10, 1, [DeviceCapacity(20, 1.0), DeviceCapacity(20, 1.0, 0.1)]) == (10, 0)
    assert assign_layers(
        10, 1, [DeviceCapacity(4, 1.0), DeviceCapacity(4, 1.0, 0.1), DeviceCapacity(9, 1.0, 0.1)]
    ) == (4, 0, 6)
    assert assign_layers(10, 1, [DeviceCapacity(20, 1.0), DeviceCapacity(20, 0.1, 0.5)]) == (0, 10)


def test_a_pass_over_machines_takes_the_time_of_its_parts_and_the_way() -> None:
    here = Curve.through([(1, 0.010), (32, 0.040)])
    transfer = Curve.through([(1 << 10, 0.020), (1 << 20, 0.030)])
    assert curve_over_machines(here, []) == here
    half = RemotePart(0.5, {1: 2.0, 32: 1.0}, transfer, 0.0, 32.0)
    found = curve_over_machines(here, [half])
    assert found.at(1) == pytest.approx(0.005 + 0.5 * 0.010 * 2.0 + transfer.at(32))
    assert found.at(32) == pytest.approx(0.020 + 0.020 + transfer.at(1024))
    described = curve_over_machines(here, [replace(half, pass_bytes=1 << 20)])
    assert described.at(1) == found.at(1)
    assert described.at(32) == pytest.approx(0.040 + transfer.at((1 << 19) + 1024))
    two = curve_over_machines(here, [replace(half, share=0.25), replace(half, share=0.25)])
    assert two.at(1) == pytest.approx(found.at(1) + transfer.at(32))


def test_passes_on_workers_are_not_taken_for_those_of_this_machine(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    slow, quick = (PassProfile(Curve.through([(1, seconds)])) for seconds in (1.0, 0.01))
    store.put(ProfileKeys.of("model", "none", threads=1, mode="m", workers="9 on a:1 2e-03").passes, slow)
    assert store.preferred_passes("model", 1, streams=False) is None
    store.put(ProfileKeys.of("model", "none", threads=1, mode="m").passes, quick)
    known = store.preferred_passes("model", 1, streams=False)
    assert known is not None
    assert known.compute == quick.compute


class ScriptedWorker:
    """Greets, then answers requests from a list until it is empty, and closes the connection."""

    def __init__(self, *answers: bytes, version: int = protocol.MAJOR_VERSION) -> None:
        self.requests: list[tuple[int, bytes]] = []
        self._answers = [protocol.hello_answer((version, 0, 0)), *answers]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = WorkerAddress(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client:
            while self._answers:
                command, length = HEADER.unpack(receive(client, HEADER.size))
                self.requests.append((command, receive(client, length)))
                if protocol.is_answered(command):
                    answer = self._answers.pop(0)
                    client.sendall(LENGTH.pack(len(answer)) + answer)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@contextmanager
def relayed(*answers: bytes) -> Iterator[tuple[ScriptedWorker, Relay, socket.socket]]:
    """A scripted worker, a relay to it, and a connection as ggml makes it."""
    worker = ScriptedWorker(*answers)
    relay = Relay(WorkerConnection(worker.address))
    host, _, port = relay.endpoint.partition(":")
    try:
        with socket.create_connection((host, int(port))) as client:
            yield worker, relay, client
    finally:
        relay.close()
        worker.close()


def request(client: socket.socket, command: RPCCommand, content: bytes = b"") -> bytes:
    client.sendall(HEADER.pack(command, len(content)) + content)
    if not protocol.is_answered(command):
        return b""
    (length,) = LENGTH.unpack(receive(client, LENGTH.size))
    return receive(client, length)


@needs_owners
def test_a_relay_passes_requests_and_answers_on() -> None:
    large = bytes(range(256)) * 4096
    with relayed(struct.pack("<I", 3), large, b"\1") as (worker, relay, client):
        assert request(client, RPCCommand.HELLO, protocol.HELLO_CONTENT)[0] == protocol.MAJOR_VERSION
        assert request(client, RPCCommand.DEVICES) == struct.pack("<I", 3)
        request(client, RPCCommand.SET, large)
        tensor = protocol.numbers_at(7, 4096, len(large) // 4)
        assert request(client, RPCCommand.GET, protocol.get_content(tensor, len(large))) == large
        assert relay.failure() is None
        assert relay.traffic.answers == 2
        request(client, RPCCommand.COPY)
    assert [command for command, _ in worker.requests] == [
        RPCCommand.HELLO,
        RPCCommand.DEVICES,
        RPCCommand.SET,
        RPCCommand.GET,
        RPCCommand.COPY,
    ]
    assert worker.requests[2][1] == large


@needs_owners
def test_a_relay_serves_its_own_process_alone() -> None:
    with relayed(struct.pack("<I", 3)) as (worker, relay, client):
        client.close()
        host, _, port = relay.endpoint.partition(":")
        stranger = (
            f"import socket; s = socket.create_connection(({host!r}, {port}))\n"
            f"s.sendall({HEADER.pack(RPCCommand.DEVICES, 0)!r})\n"
            "try: print(s.recv(1))\nexcept ConnectionError: print(b'')"
        )
        told = subprocess.run([sys.executable, "-c", stranger], capture_output=True, check=True, text=True)
        assert told.stdout == "b''\n"
        with socket.create_connection((host, int(port))) as own:
            assert request(own, RPCCommand.DEVICES) == struct.pack("<I", 3)
    assert len(worker.requests) == 2, "a greeting, and one request"


@needs_owners
@pytest.mark.parametrize(
    "command", [c for c in RPCCommand if protocol.is_answered(c) and c != RPCCommand.HELLO]
)
def test_a_relay_answers_for_a_worker_that_is_gone(command: RPCCommand) -> None:
    tensor = protocol.numbers_at(7, 4096, 100)
    content = protocol.get_content(tensor, 400) if command == RPCCommand.GET else tensor
    with relayed() as (worker, relay, client):
        answer = request(client, command, content)
        error = relay.failure()
        assert error is not None
        assert f"The worker {worker.address} is gone" in error.what
        assert answer == protocol.stand_in(command, content)
        request(client, RPCCommand.SET, bytes(1 << 20))  # is dropped, and blocks nobody
        assert len(request(client, RPCCommand.GET, protocol.get_content(tensor, 400))) == 400


@needs_owners
def test_an_answer_that_breaks_off_is_filled_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        breaking = threading.Thread(target=_break_off, args=(listener,))
        breaking.start()
        relay = Relay(WorkerConnection(WorkerAddress(*listener.getsockname())))
        host, _, port = relay.endpoint.partition(":")
        with socket.create_connection((host, int(port))) as client:
            tensor = protocol.numbers_at(7, 4096, 1 << 20)
            found = request(client, RPCCommand.GET, protocol.get_content(tensor, 4 << 20))
            assert len(found) == 4 << 20
            assert found.endswith(bytes(1 << 20))
            assert relay.failure() is not None
        relay.close()
        breaking.join()


@needs_owners
def test_a_worker_that_hangs_is_given_up_once_nobody_waits() -> None:
    """After Ctrl-C, as ggml cannot be interrupted while it waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hanging = threading.Thread(target=_hang, args=(listener,))
        hanging.start()
        wanted = threading.Event()
        wanted.set()
        address = WorkerAddress(*listener.getsockname())
        relay = Relay(WorkerConnection(address), lambda: not wanted.is_set(), stop_s=0.05)
        host, _, port = relay.endpoint.partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(HEADER.pack(RPCCommand.DEVICES, 0))
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert relay.failure() is None
            wanted.clear()
            client.settimeout(PATIENCE_S)
            assert LENGTH.unpack(receive(client, LENGTH.size)) == (4,)
            assert "it no longer answers" in str(relay.failure())
        relay.close()
        hanging.join()


def _hang(listener: socket.socket) -> None:
    """A worker that greets, and then says nothing until it is left."""
    client, _ = listener.accept()
    with client:
        _, length = HEADER.unpack(receive(client, HEADER.size))
        receive(client, length)
        answer = protocol.hello_answer((protocol.MAJOR_VERSION, 0, 0))
        client.sendall(LENGTH.pack(len(answer)) + answer)
        while client.recv(100):
            pass


def _break_off(listener: socket.socket) -> None:
    """A worker that dies in the middle of an answer."""
    client, _ = listener.accept()
    with client:
        answer = protocol.hello_answer((protocol.MAJOR_VERSION, 0, 0))
        for content, announced in ((answer, len(answer)), (b"x" * 100_000, 4 << 20)):
            _, length = HEADER.unpack(receive(client, HEADER.size))
            receive(client, length)
            client.sendall(LENGTH.pack(announced) + content)


def test_who_is_no_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = WorkerAddress(*listener.getsockname())
        with pytest.raises(WorkerError, match="does not respond") as failure:
            WorkerConnection(address, reach_s=0.2)
        assert "one program at a time" in failure.value.hint
    with pytest.raises(WorkerError, match="cannot be reached"):
        WorkerConnection(address, reach_s=0.2)


def test_a_worker_of_another_version() -> None:
    worker = ScriptedWorker(version=protocol.MAJOR_VERSION + 1)
    with pytest.raises(WorkerError, match=f"speaks version {protocol.MAJOR_VERSION + 1}"):
        WorkerConnection(worker.address)
    worker.close()
