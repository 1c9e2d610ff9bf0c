"""The messages of llama.cpp's RPC backend, as far as connections are checked, measured and passed on.

A request is a byte for the command, eight for the length, and the content. Some commands are answered: eight
bytes for the length, and the content. All numbers are little-endian. This is major version 7
(ggml-rpc.cpp of the pinned llama.cpp); the first messages on a connection tell which version the worker has.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAJOR_VERSION = 7
HEADER = struct.Struct("<BQ")
LENGTH = struct.Struct("<Q")

_TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")
_F32 = 0
_CAPABILITIES = 24  # bytes that describe faster transports, which are not used
_REGION = struct.Struct("<QQ")  # offset and length within a tensor
_LARGEST_BUFFER = (1 << 64) - 1


class RPCCommand(IntEnum):
    """A request of a client."""

    ALLOCATE = 0
    ALIGNMENT = 1
    LARGEST = 2
    BASE = 3
    FREE = 4
    CLEAR = 5
    SET = 6
    SET_BY_HASH = 7
    GET = 8
    COPY = 9
    COMPUTE = 10
    MEMORY = 11
    INITIALIZE = 12
    ALLOCATED_SIZE = 13
    HELLO = 14
    DEVICES = 15
    COMPUTE_AGAIN = 16
    FILL = 17


HELLO_CONTENT = bytes(_CAPABILITIES)

# What a client takes for an answer when there is nobody to give one: no buffer, nothing to copy, and so on.
_STAND_INS = {
    RPCCommand.ALLOCATE: bytes(16),
    RPCCommand.ALIGNMENT: LENGTH.pack(64),
    RPCCommand.LARGEST: LENGTH.pack(_LARGEST_BUFFER),
    RPCCommand.BASE: LENGTH.pack(1 << 32),
    RPCCommand.SET_BY_HASH: b"\1",
    RPCCommand.COPY: b"\1",
    RPCCommand.MEMORY: bytes(16),
    RPCCommand.ALLOCATED_SIZE: LENGTH.pack(0),
    RPCCommand.DEVICES: struct.pack("<I", 1),
}


def is_answered(command: int) -> bool:
    """True if a command has an answer."""
    return command in _STAND_INS or command in (RPCCommand.GET, RPCCommand.HELLO)


def stand_in(command: int, content: bytes) -> bytes:
    """The content of a well-formed answer that says nothing, for a request with this content."""
    if command == RPCCommand.GET:
        return bytes(_REGION.unpack_from(content, _TENSOR.size)[1])
    return _STAND_INS[RPCCommand(command)]


def hello_answer(version: tuple[int, int, int]) -> bytes:
    """The content of the answer to a greeting."""
    return bytes(version) + bytes(1 + _CAPABILITIES)


def version_of(answer: bytes) -> tuple[int, int, int]:
    return answer[0], answer[1], answer[2]


def numbers_at(buffer: int, base: int, count: int) -> bytes:
    """A row of 32-bit numbers at the start of a buffer, as requests describe tensors."""
    strides = (4, 4 * count, 4 * count, 4 * count)
    return _TENSOR.pack(
        1, _F32, buffer, count, 1, 1, 1, *strides, *[0] * 17, 0, *[0] * 10, 0, 0, base, b"numbers", 0
    )


def set_content(tensor: bytes, data: bytes) -> bytes:
    """The content of a request that writes a tensor."""
    return tensor + b"\0" + LENGTH.pack(0) + data


def get_content(tensor: bytes, n_bytes: int) -> bytes:
    """The content of a request that reads a tensor."""
    return tensor + _REGION.pack(0, n_bytes)
