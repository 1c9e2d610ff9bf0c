"""The API keys that requests carry."""

from __future__ import annotations

import hashlib

from starlette.types import Scope

_HEADERS = (b"authorization", b"x-api-key", b"api-key")


def keys_in(scope: Scope) -> list[bytes]:
    """The keys in the headers of a request, whether the server asks for one or not."""
    return [_key_in(value) for name, value in scope["headers"] if name in _HEADERS]


def owner_of(scope: Scope) -> bytes:
    """A digest of the keys of a request: who asks.

    A server that asks for no key may be behind a proxy that does.
    """
    return hashlib.blake2b(b"\n".join(keys_in(scope)), digest_size=16).digest()


def _key_in(value: bytes) -> bytes:
    """The key in a header, with or without a scheme (RFC 9110: in any case, and followed by blanks)."""
    scheme, _, rest = value.strip().partition(b" ")
    return rest.strip() if scheme.lower() == b"bearer" else value.strip()
