"""GGUF headers taken apart and put together again, so that they can be damaged with understanding.

`small_model` cuts a real model down to a file of some hundred kilobytes that llama.cpp loads: every metadata
entry is the real one, with fewer tokens, fewer layers and smaller matrices.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.models.gguf.types import BLOCK_SIZES
from tests.tiny import write_tiny

STRING, ARRAY, UINT32 = 8, 9, 4
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32


@dataclass(frozen=True)
class Entry:
    """A metadata entry; `element` is the type of an array's elements."""

    key: bytes
    type_id: int
    value: Any
    element: int = 0

    @cached_property
    def packed(self) -> bytes:
        """The entry as it is in a file."""
        return _string(self.key) + struct.pack("<I", self.type_id) + _value(self)


@dataclass(frozen=True)
class Tensor:
    """A tensor's description; `offset` None is where it belongs."""

    name: bytes
    shape: tuple[int, ...]
    type_id: int
    offset: int | None = None

    @property
    def n_bytes(self) -> int:
        elements, block = BLOCK_SIZES.get(self.type_id, (1, 1))
        count = 1
        for size in self.shape:
            count *= max(size, 0)
        return count // elements * block


@dataclass
class Header:
    """A whole header, and the length of the data behind it."""

    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    data_bytes: int | None = None  # None: as much as the tensors need

    def copy(self) -> Header:
        return Header(list(self.entries), list(self.tensors), self.version, self.data_bytes)

    def index(self, key: str) -> int:
        return next(i for i, entry in enumerate(self.entries) if entry.key == key.encode())

    def change(self, key: str, value: Any) -> None:
        at = self.index(key)
        self.entries[at] = replace(self.entries[at], value=value)

    def to_bytes(self) -> bytes:
        """The file."""
        head, zeros = self.parts()
        return head + bytes(zeros)

    def parts(self) -> tuple[bytes, int]:
        """The file up to its data, and the length of the data, which are zeros."""
        out = [struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.entries))]
        out += [entry.packed for entry in self.entries]
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            out.append(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
            out += [struct.pack("<Q", size & (2**64 - 1)) for size in tensor.shape]
            out.append(struct.pack("<IQ", tensor.type_id, offset & (2**64 - 1)))
            at = -(-(at + tensor.n_bytes) // _ALIGNMENT) * _ALIGNMENT
        header = b"".join(out)
        padding = -len(header) % _ALIGNMENT
        length = min(at, 1 << 24) if self.data_bytes is None else self.data_bytes
        return header + bytes(padding), length


def parse(data: bytes) -> Header:
    """Take a well-formed header apart."""
    reader = _Cursor(data)
    _, version, n_tensors, n_entries = reader.take("<4sIQQ")
    header = Header(version=version)
    for _ in range(n_entries):
        key = reader.string()
        (type_id,) = reader.take("<I")
        if type_id == STRING:
            header.entries.append(Entry(key, type_id, reader.string()))
        elif type_id == ARRAY:
            element, length = reader.take("<IQ")
            values = [
                reader.string() if element == STRING else reader.take(f"<{CODES[element]}")[0]
                for _ in range(length)
            ]
            header.entries.append(Entry(key, type_id, values, element))
        else:
            header.entries.append(Entry(key, type_id, reader.take(f"<{CODES[type_id]}")[0]))
    for _ in range(n_tensors):
        name = reader.string()
        (dims,) = reader.take("<I")
        shape = reader.take(f"<{dims}Q")
        type_id, _offset = reader.take("<IQ")
        header.tensors.append(Tensor(name, shape, type_id))
    return header


def small_model(path: Path, *, tokens: int = 320, layers: int = 2) -> Header:
    """The header of a llama model, cut down: narrow matrices, few layers, the first tokens."""
    with path.open("rb") as file:
        header = parse(file.read(32 << 20))
    width, heads, kv_heads, hidden = 64, 2, 1, 128
    for key, value in {
        "llama.embedding_length": width,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.feed_forward_length": hidden,
        "llama.block_count": layers,
        "llama.rope.dimension_count": width // heads,
    }.items():
        header.change(key, value)
    vocabulary = header.entries[header.index("tokenizer.ggml.tokens")].value
    kept = set(vocabulary[:tokens])
    merges = [
        merge
        for merge in header.entries[header.index("tokenizer.ggml.merges")].value
        if all(part in kept for part in merge.split(b" "))
    ]
    header.change("tokenizer.ggml.tokens", vocabulary[:tokens])
    header.change("tokenizer.ggml.merges", merges[:200])
    for i, entry in enumerate(header.entries):
        if entry.type_id == ARRAY and len(entry.value) == len(vocabulary):
            header.entries[i] = replace(entry, value=entry.value[:tokens])
        if entry.key == b"llama.vocab_size":
            header.entries[i] = replace(entry, value=tokens)
    sizes = {b"attn_q": (width, width), b"attn_k": (width, width // heads * kv_heads)}
    sizes |= {b"attn_v": sizes[b"attn_k"], b"attn_output": (width, width), b"ffn_gate": (width, hidden)}
    sizes |= {b"ffn_up": (width, hidden), b"ffn_down": (hidden, width), b"token_embd": (width, tokens)}
    small = []
    for tensor in header.tensors:
        parts = tensor.name.split(b".")
        if parts[0] == b"blk" and int(parts[1]) >= layers:
            continue
        kind = parts[2] if parts[0] == b"blk" else parts[0]
        # Blocks of 32 fit the narrow rows, whatever type the real tensor has.
        type_id = tensor.type_id if BLOCK_SIZES[tensor.type_id][0] <= 32 else 8
        small.append(Tensor(tensor.name, sizes.get(kind, (width,)), type_id))
    header.tensors = small
    return header


def tiny_model(architecture: str, vocabulary_of: Path, folder: Path, *, layers: int = 2) -> Header:
    """The header of a model of another architecture, with random weights and few layers."""
    path = write_tiny(folder / f"{architecture}.gguf", architecture, vocabulary_of)
    header = parse(path.read_bytes())
    header.change(f"{architecture}.block_count", layers)
    parts = [tensor.name.split(b".") for tensor in header.tensors]
    kept = [part[0] != b"blk" or int(part[1]) < layers for part in parts]
    header.tensors = [tensor for tensor, keep in zip(header.tensors, kept, strict=True) if keep]
    return header


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def string(self) -> bytes:
        (length,) = self.take("<Q")
        self._at += length
        return self._data[self._at - length : self._at]


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(entry: Entry) -> bytes:
    if entry.type_id == STRING:
        return _string(entry.value)
    if entry.type_id == ARRAY:
        head = struct.pack("<IQ", entry.element, len(entry.value))
        if entry.element == STRING:
            return head + b"".join(_string(text) for text in entry.value)
        return head + struct.pack(f"<{len(entry.value)}{CODES[entry.element]}", *entry.value)
    return struct.pack(f"<{CODES[entry.type_id]}", entry.value)
