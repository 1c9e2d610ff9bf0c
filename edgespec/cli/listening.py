"""The error for an address that the program cannot listen on."""

from __future__ import annotations

import errno

from edgespec.errors import UsageError


def cannot_listen(host: str, port: int, error: OSError, hint: str) -> UsageError:
    """The error for an address that another program has, or the system does not allow."""
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} is already in use.", hint)
    return UsageError(f"Cannot listen on {host}:{port}: {error.strerror}.", hint)
