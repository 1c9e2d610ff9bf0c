"""The addresses at which workers listen: reading them, and telling which only a few machines can reach."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from edgespec.errors import UsageError

DEFAULT_PORT = 50052
"""What llama.cpp's own server of this kind listens on."""


@dataclass(frozen=True)
class WorkerAddress:
    """A host by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> WorkerAddress:
        """Parse "host:port", or "host" alone.

        Raises:
            UsageError: it is neither.
        """
        host, colon, port = text.strip().partition(":")
        number = int(port) if port.isascii() and port.isdigit() else -1
        if not host or (colon and not 0 <= number <= 65535) or len(host.split()) != 1:
            raise UsageError(
                f"'{text}' is not the address of a worker.",
                "Write a name or an IPv4 address, and a port: 192.168.0.7:50052.",
            )
        return cls(host, number if colon else DEFAULT_PORT)

    def resolved(self) -> str:
        """The IPv4 address of the host; llama.cpp's server and client know no other.

        Raises:
            OSError: there is none.
        """
        return str(socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def parse_addresses(text: str) -> tuple[WorkerAddress, ...]:
    """The addresses of a list with commas.

    Raises:
        UsageError: one is none, can be no worker's, or is there twice.
    """
    found = tuple(WorkerAddress.parse(part) for part in text.split(",") if part.strip())
    if any(address.port == 0 for address in found):
        raise UsageError("A worker was named with port 0.", "Name the port that it listens on.")
    if len(set(found)) < len(found):
        raise UsageError(f"A worker was named twice: {text}.", "Name each once.")
    return found


def is_guarded(number: str) -> bool:
    """True if only this machine or a private network can reach an IPv4 address."""
    address = ipaddress.ip_address(number)
    return not address.is_unspecified and (address.is_loopback or address.is_private)
