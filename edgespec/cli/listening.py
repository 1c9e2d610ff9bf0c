"""Addresses that the program listens on, and the error for one that it cannot have."""

from __future__ import annotations

import errno
import ipaddress
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded

_BACKLOG = 128
_HINT = "Choose another --port or --host."


def split_hosts(text: str) -> list[str]:
    """The addresses in a list with commas; those of IPv6 may have brackets."""
    hosts = [host.strip().removeprefix("[").removesuffix("]") for host in text.split(",")]
    if not all(hosts):
        raise UsageError("--host has an empty address.", "Give addresses, separated by commas.")
    for host in hosts:
        name, _, port = host.rpartition(":")
        if name and ":" not in name and port.isdecimal():
            raise UsageError(f"--host takes no port, as in {host}.", f"Use --port {port}.")
    return hosts


def is_unix_socket(host: str) -> bool:
    """True if an address is the path of a Unix socket."""
    return "/" in host


def is_local(host: str) -> bool:
    """True if only this machine can reach an address."""
    if host == "localhost" or is_unix_socket(host):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def listening(hosts: list[str], port: int, hint: str = _HINT) -> Iterator[list[socket.socket]]:
    """Listen on addresses, all with the same port; 0 is one that is free. Errors end with the hint."""
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for host in hosts:
            if is_unix_socket(host):
                listeners.append(stack.enter_context(_unix_listener(expanded(host))))
                continue
            try:
                listener = _tcp_listener(host, port, stack, alone=len(hosts) == 1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UsageError(f"Port {port} is already in use.", hint) from error
                raise UsageError(f"Cannot listen on {host}:{port}: {error.strerror}.", hint) from error
            port = listener.getsockname()[1]
            listeners.append(listener)
        yield listeners


def _tcp_listener(host: str, port: int, stack: ExitStack, *, alone: bool) -> socket.socket:
    """A listening socket, closed with the stack; `alone` lets :: take IPv4 connections too."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    # On Windows, SO_REUSEADDR would let a second program take the port.
    option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    listener.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6 and not alone:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind((host, port))
    listener.listen(_BACKLOG)
    return listener


@contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket for the user and the group; its file is removed at the end."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError(f"This system has no Unix sockets such as {path}.", _HINT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path, listener.family)
            listener.bind(str(path))
            own = path.stat().st_ino
            path.chmod(0o660)  # before anybody can connect
            listener.listen(_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = "is already in use" if path.is_socket() else "exists and is not a socket"
                raise UsageError(f"{path} {what}.", "Choose another --host.") from error
            reason = error.strerror or str(error)
            raise UsageError(f"Cannot listen on {path}: {reason}.", "Choose another --host.") from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if path.stat().st_ino == own:  # not that of a server that replaced it
                    path.unlink()


def _remove_stale(path: Path, family: int) -> None:
    """Remove the socket of a server that has crashed."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(family, socket.SOCK_STREAM) as client:
                client.setblocking(False)
                try:
                    client.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
