"""Ray: joins a cluster, or starts one on this machine, and calls what runs on its nodes.

Ray is an optional dependency, and takes a second to import: it is imported when a cluster is opened.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.cli.batch.cluster.address import RayAddress
from edgespec.cli.batch.cluster.node import Node
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.processes.environment import environment_set

_REACH_S = 5.0
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least; prompts and answers are small
_LONGEST_FOLDER = 40  # characters: paths of sockets have 107, of which Ray takes more than 60
_PREFIX = "edgespec-ray-"
_FRAME_HEADER, _SETTINGS_FRAME = 9, 4  # bytes, and the type in the fourth of them: RFC 9113, section 4.1
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # errors are handled where their calls are looked at
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # engines see the devices that they would see without Ray
}
_LOCAL_SETTINGS = {
    # Addresses of this machine are taken to be 127.0.0.1, so that nothing listens to the network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Engines have a memory budget of their own, and more is not taken from them when memory gets scarce.
    "RAY_memory_monitor_refresh_ms": "0",
}


@dataclass(frozen=True)
class EngineSlot:
    """A slot on a node in which an engine can run.

    Attributes:
        node: Ray's id of the node.
        number: of the engine among those on that node.
        name: of the node, for messages.
        cpus, gpus: those of the node that the engine occupies.
    """

    node: str
    number: int
    name: str
    cpus: float
    gpus: float = 0.0


class WorkerLost(Exception):
    """A worker on a node has ended, or cannot be reached."""


class RayCluster:
    """A Ray cluster that this process has joined.

    Args:
        ray: the module.
        where: the cluster's name, for messages.
        engines: how many there are to be on each node.
    """

    def __init__(self, ray: Any, where: str, engines: int) -> None:
        self.where = where
        self._ray = ray
        self._engines = engines
        known = ray.exceptions
        self._lost = (known.RayActorError, known.ActorUnschedulableError, known.NodeDiedError)

    def slots(self) -> list[EngineSlot]:
        """Every slot for an engine on the nodes that are there now."""
        found = []
        for node in self._ray.nodes():
            cpus = node["Resources"].get("CPU", 0.0)
            if not node["Alive"] or not cpus:
                continue
            host, ip = node["NodeManagerHostname"], node["NodeManagerAddress"]
            for number in range(self._engines):
                name = f"{host} ({ip})" if self._engines == 1 else f"{host} (engine {number + 1})"
                gpus = node["Resources"].get("GPU", 0.0) / self._engines
                found.append(EngineSlot(node["NodeID"], number, name, cpus / self._engines, gpus))
        return found

    def start(self, slot: EngineSlot) -> Any:
        """Start a `Node` in a slot as soon as its processors are free; returns its handle."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return (
            self._ray.remote(Node)
            .options(
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                max_concurrency=10_000,  # calls wait for answers; the engine takes as many as are good for it
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
            )
            .remote()
        )

    def finished(self, calls: Collection[Any], timeout_s: float) -> list[Any]:
        """Wait until a call is finished, and return all finished calls."""
        if not calls:
            return []
        first, others = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if first and others:
            more, _ = self._ray.wait(others, num_returns=len(others), timeout=0)
            first += more
        return list(first)

    def value(self, call: Any) -> Any:
        """Return the result of a finished call.

        Raises:
            WorkerLost: its node has ended.
            EdgeSpecError: the call failed in another way.
        """
        try:
            return self._ray.get(call)
        except self._lost as error:
            raise WorkerLost(str(error)) from error
        except Exception as error:  # whatever Ray or a bug raises
            raise EdgeSpecError(f"This is a bug in EdgeSpec: {_last_line(error)}") from error

    def kill(self, actor: Any) -> None:
        """End what runs in a slot, whether it can be reached or not."""
        with suppress(Exception):
            self._ray.kill(actor)


@contextmanager
def opened(address: RayAddress) -> Iterator[RayCluster]:
    """The cluster at an address, for as long as the block runs.

    What Ray prints on standard output is discarded, as that is for results; so whoever writes there must
    have taken hold of `sys.stdout` before.

    Raises:
        UsageError: Ray is not installed.
        EdgeSpecError: there is no cluster at that address, or it cannot be joined or started.
    """
    with ExitStack() as stack:
        settings = {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}
        if address.is_local:
            settings |= _LOCAL_SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        stack.enter_context(environment_set(settings))  # Ray reads it when it is imported
        ray = _imported()
        _check_head(address)
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        arguments: dict[str, Any] = {"address": address.address, "_skip_env_hook": True}
        if address.is_local:
            arguments = {
                "address": "local",
                "num_cpus": address.engines,
                "num_gpus": 0,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": stack.enter_context(_temporary_folder()),
            }
        stack.callback(ray.shutdown)
        with _signals_kept():
            try:
                ray.init(log_to_driver=False, logging_level="CRITICAL", **arguments)
            except Exception as error:
                raise _cannot_be_joined(address, error) from error
        yield RayCluster(ray, _where(address), address.engines)


def _where(address: RayAddress) -> str:
    here = address.host_and_port is None
    return "of this machine" if here else f"at {address.address}"


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UsageError(
            f"--ray needs the package ray, but importing it failed: {error}.",
            "Install it: pip install 'edgespec[ray]'. Install it on every machine of the cluster.",
        ) from error
    return ray


def _check_head(address: RayAddress) -> None:
    """Find out at once whether a server of Ray's kind (HTTP/2) listens; Ray would try for minutes."""
    if address.host_and_port is None:
        return
    hint = "Give the HOST:PORT that 'ray start --head' printed, or 'local' to use this machine alone."
    try:
        with socket.create_connection(address.host_and_port, timeout=_REACH_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    except OSError as error:
        raise EdgeSpecError(
            f"There is no Ray cluster at {address.address}: {error.strerror or error}.", hint
        ) from error
    if len(answer) < _FRAME_HEADER or answer[3] != _SETTINGS_FRAME:
        raise EdgeSpecError(f"{address.address} is not a Ray cluster.", hint)


def _cannot_be_joined(address: RayAddress, error: Exception) -> EdgeSpecError:
    if address.is_local:
        return EdgeSpecError(f"Ray cannot be started on this machine: {_last_line(error)}")
    return EdgeSpecError(
        f"The Ray cluster {_where(address)} cannot be joined: {_last_line(error)}",
        "Run this on a machine of the cluster (ray start --address HOST:PORT), with the cluster's "
        "versions of Ray and Python, and its token if it has one.",
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep what SIGTERM does; Ray installs a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for the files of a local Ray; those that killed programs left behind are removed."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + len(_PREFIX) > _LONGEST_FOLDER and sys.platform != "win32":
        parent = Path("/tmp")
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    import psutil

    owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
    if owner.isdecimal() and not psutil.pid_exists(int(owner)):
        shutil.rmtree(folder, ignore_errors=True)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
