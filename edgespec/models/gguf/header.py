"""Reading GGUF headers: metadata and tensor ranges, refusing what is malformed.

A model file is untrusted input, and llama.cpp answers a bad one with a log line or an abort. So every file is
read here first. The contract: `read_header` returns a header whose tensors all lie inside the file, or raises
ModelFileError. Whatever the bytes are, it ends soon and allocates no more than the header it has read. The
rules are llama.cpp's own (`gguf.cpp`), plus limits on counts that no real model comes near.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.files.state import FileState
from edgespec.models.gguf.cursor import (
    ARRAY,
    DOWNLOAD_AGAIN,
    INT64,
    MAX_HEADER_BYTES,
    SCALARS,
    STRING,
    UINT32,
    UINT64,
    VALUE_TYPES,
    Cursor,
    IncompleteHeader,
)
from edgespec.models.gguf.header_checks import find_fault
from edgespec.models.gguf.not_gguf import not_gguf, require_regular_file, unreadable
from edgespec.models.gguf.types import BLOCK_SIZES, ArrayInfo, GGUFHeader, TensorInfo

_DEFAULT_ALIGNMENT = 32
_LEAST_ALIGNMENT = 32  # llama.cpp aborts when it computes with mapped weights of smaller alignment
_MAX_DIMS = 4
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its terminator
_INT64_MAX = 2**63 - 1
_KEPT_INTEGERS = 64  # elements of an array whose values are kept

# Large vocabularies have 2.6e5 tokens, large expert models 5e4 tensors. Like the limit on the header's bytes,
# these bound the work on a sparse file.
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**19
_MAX_STRINGS = 2**23
_MAX_READ_HEADERS = 64
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # key length, shortest key, type, shortest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dimension count, one dimension, type, offset

_read_headers: dict[Path, tuple[FileState, GGUFHeader]] = {}


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of one GGUF file (of a split model: of that one file).

    A header that this process has read is returned again while the file is unchanged, since checking a large
    vocabulary takes a tenth of a second, and loading asks several times.

    Raises:
        ModelFileError: the path does not lead to a readable GGUF file, or the file is damaged.
    """
    path = Path(path)
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            if not file.peek(1):
                raise ModelFileError(f"{path} is empty.", DOWNLOAD_AGAIN)
            state = FileState.of(file.fileno())
            settled = state.settled
            known = _read_headers.get(path)
            if known is not None and known[0] == state:
                return known[1]
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _HeaderReader(Cursor(path, data)).read()
    except OSError as error:
        raise unreadable(path, error) from error
    if settled:
        if len(_read_headers) >= _MAX_READ_HEADERS:
            _read_headers.clear()
        _read_headers[path] = state, header
    return header


def read_header_bytes(name: Path, data: bytes, file_bytes: int) -> GGUFHeader:
    """Read and check a header from the first bytes of a file that is not on this machine.

    Args:
        name: what the file is called in messages.
        data: its beginning.
        file_bytes: its whole size.

    Raises:
        IncompleteHeader: the header is longer than `data`.
        ModelFileError: the file is not a GGUF file, or is damaged.
    """
    return _HeaderReader(Cursor(name, data, file_bytes)).read()


class _HeaderReader:
    """Reads one header from its beginning to its end."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._missing_byte: int | None = None  # the first byte that no token stands for

    def read(self) -> GGUFHeader:
        version = self._read_version()
        tensor_count = self._read_count("tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
        entry_count = self._read_count("metadata entries", _MIN_ENTRY_BYTES, _MAX_ENTRIES)
        metadata = self._read_metadata(entry_count)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            self._cursor.damaged(f"general.alignment is {alignment}, which is not a power of two")
        if alignment < _LEAST_ALIGNMENT:
            self._cursor.damaged(f"general.alignment is {alignment}; weights need {_LEAST_ALIGNMENT}")
        architecture = metadata.get("general.architecture")
        if not (isinstance(architecture, str) and architecture) and not metadata.get("split.no"):
            self._cursor.damaged("its metadata has no general.architecture")
        relative = self._read_tensors(tensor_count, alignment)
        fault = find_fault(metadata, relative) or self._byte_fault(metadata)
        if fault:
            self._cursor.damaged(fault)
        data_offset = _round_up(self._cursor.at, alignment)
        tensors = tuple(replace(t, offset=data_offset + t.offset) for t in relative)
        if tensors:
            self._cursor.require_size(tensors[-1].offset + tensors[-1].n_bytes, "its tensors")
        return GGUFHeader(
            path=self._cursor.path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            alignment=alignment,
            data_offset=data_offset,
            file_bytes=self._cursor.size,
            fingerprint=self._fingerprint(),
        )

    def _read_version(self) -> int:
        if len(self._cursor.data) < 4 <= self._cursor.size:
            raise IncompleteHeader(4)
        if self._cursor.data[:4] != b"GGUF":
            raise not_gguf(self._cursor.path, self._cursor.data[:512])
        self._cursor.at = 4
        version = int(self._cursor.scalar(UINT32, "its version"))
        if version & 0xFFFF == 0 and version:
            raise ModelFileError(
                f"{self._cursor.path} is a big-endian GGUF file.", "Get the little-endian file."
            )
        if version not in (2, 3):
            raise ModelFileError(
                f"{self._cursor.path} has GGUF version {version}; versions 2 and 3 can be read.",
                "Get a newer conversion of the model."
                if version == 1
                else "Update EdgeSpec, or get another conversion of the model.",
            )
        return version

    def _read_count(self, what: str, min_bytes: int, most: int) -> int:
        count = int(self._cursor.scalar(UINT64, f"its number of {what}"))
        if count > most:
            self._cursor.damaged(f"it claims {count:,} {what}; at most {most:,} are allowed")
        self._cursor.require_size(self._cursor.at + count * min_bytes, f"its {count:,} {what}")
        return count

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        strings_left = _MAX_STRINGS
        for index in range(count):
            key = self._cursor.name(f"metadata key {index}")
            if not key:
                self._cursor.damaged(f"metadata key {index} is empty")
            if key in metadata:
                self._cursor.damaged(f"metadata key {_quote(key)} appears twice")
            type_id = self._cursor.scalar(UINT32, f"metadata {_quote(key)}")
            if key == "general.alignment" and type_id != UINT32:
                self._cursor.damaged(f"general.alignment has value type {type_id} instead of uint32")
            value = self._value(type_id, f"metadata {_quote(key)}")
            if isinstance(value, ArrayInfo) and value.element_type == "string":
                start = self._cursor.at
                strings_left -= self._skip_strings(value.length, strings_left, _quote(key))
                if key == "tokenizer.ggml.tokens":
                    self._check_tokens(start, value.length)
                value = replace(value, byte_range=(start, self._cursor.at))
            metadata[key] = value
        return metadata

    def _value(self, type_id: int, where: str) -> Any:
        """Read a metadata value; of an array of strings, only its length (the strings follow)."""
        if type_id == STRING:
            return self._cursor.bytes(where).decode("utf-8", "replace")
        if type_id in SCALARS:
            return self._cursor.scalar(type_id, where)
        if type_id != ARRAY:
            self._cursor.damaged(f"{where} has unknown value type {type_id}")
        element_id = self._cursor.scalar(UINT32, where)
        length = self._cursor.scalar(UINT64, where)
        if element_id == ARRAY:
            self._cursor.damaged(f"{where} is an array of arrays, which llama.cpp does not read")
        if element_id not in VALUE_TYPES:
            self._cursor.damaged(f"{where} is an array of unknown value type {element_id}")
        if element_id in SCALARS:
            start = self._cursor.at
            self._cursor.advance(length * SCALARS[element_id].size, where)
            kind = VALUE_TYPES[element_id][0]
            if (kind == "bool" or "int" in kind) and length <= _KEPT_INTEGERS:
                code = VALUE_TYPES[element_id][1]
                values = struct.unpack_from(f"<{length}{code}", self._cursor.data, start)
                return ArrayInfo(kind, length, values)
        return ArrayInfo(VALUE_TYPES[element_id][0], length)

    def _skip_strings(self, count: int, most: int, key: str) -> int:
        where = f"metadata {key}"
        self._cursor.require_size(self._cursor.at + count * 8, where)
        if count > most:
            self._cursor.damaged(f"{where} has {count:,} strings; at most {_MAX_STRINGS:,} are allowed")
        unpack, data, at = struct.Struct("<Q").unpack_from, self._cursor.data, self._cursor.at
        last = min(len(data), MAX_HEADER_BYTES) - 8
        for _ in range(count):  # the one long loop: a vocabulary
            if at > last:
                self._cursor.advance(at + 8 - self._cursor.at, where)  # raises: there is no such byte
            at += 8 + unpack(data, at)[0]
        self._cursor.advance(at - self._cursor.at, where)
        return count

    def _check_tokens(self, at: int, count: int) -> None:
        """Refuse duplicate tokens: llama.cpp aborts over them."""
        unpack, data = struct.Struct("<Q").unpack_from, self._cursor.data
        seen: set[bytes] = set()
        named = 0
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            text = data[start:at].partition(b"\0")[0]  # llama.cpp reads C strings
            if text:  # it makes empty ones unique itself
                named += 1
                seen.add(text)
                if len(seen) < named:
                    self._cursor.damaged(f"its vocabulary has the token {text[:40]!r} twice")
        self._missing_byte = next(
            (byte for byte in range(256) if not seen & {b"<0x%02X>" % byte, bytes([byte])}), None
        )

    def _byte_fault(self, metadata: dict[str, Any]) -> str:
        """A SentencePiece vocabulary must have a token for every byte: llama.cpp looks them up unchecked."""
        if metadata.get("tokenizer.ggml.model") != "llama" or self._missing_byte is None:
            return ""
        return f"its vocabulary has no token for byte {self._missing_byte:#04x}"

    def _read_tensors(self, count: int, alignment: int) -> list[TensorInfo]:
        """Tensor infos with offsets relative to the data; they follow one another without gaps."""
        tensors: list[TensorInfo] = []
        names: set[str] = set()
        expected = 0
        for index in range(count):
            tensor = self._read_tensor(index)
            label = f"tensor {_quote(tensor.name)}"
            if tensor.name in names:
                self._cursor.damaged(f"{label} appears twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                self._cursor.damaged(f"{label} is at offset {tensor.offset}, no multiple of {alignment}")
            if tensor.offset != expected:
                fault = "overlaps the one before it" if tensor.offset < expected else "leaves a gap"
                self._cursor.damaged(
                    f"{label} {fault}: it is at offset {tensor.offset} instead of {expected}"
                )
            expected = _round_up(expected + tensor.n_bytes, alignment)
            tensors.append(tensor)
        return tensors

    def _read_tensor(self, index: int) -> TensorInfo:
        name = self._cursor.name(f"tensor name {index}")
        label = f"tensor {_quote(name)}"
        if len(name.encode()) > _MAX_NAME_BYTES:
            self._cursor.damaged(f"{label} has a name longer than {_MAX_NAME_BYTES} bytes")
        dims = int(self._cursor.scalar(UINT32, label))
        if not 1 <= dims <= _MAX_DIMS:
            self._cursor.damaged(f"{label} has {dims} dimensions")
        shape = tuple(int(self._cursor.scalar(INT64, label)) for _ in range(dims))
        if min(shape) <= 0 or math.prod(shape) > _INT64_MAX:
            self._cursor.damaged(f"{label} has the impossible shape {list(shape)}")
        type_id = int(self._cursor.scalar(UINT32, label))
        if type_id not in BLOCK_SIZES:
            self._cursor.damaged(f"{label} has unknown type {type_id}")
        elements, block_bytes = BLOCK_SIZES[type_id]
        if shape[0] % elements:
            self._cursor.damaged(f"{label} has rows of {shape[0]}, no multiple of its block of {elements}")
        offset = int(self._cursor.scalar(UINT64, label))
        return TensorInfo(name, shape, type_id, offset, math.prod(shape) // elements * block_bytes)

    def _fingerprint(self) -> str:
        with memoryview(self._cursor.data) as view, view[: self._cursor.at] as header:
            return hashlib.blake2b(header, digest_size=16).hexdigest()


def _quote(name: str) -> str:
    # repr, because a name from the file could otherwise carry terminal control sequences.
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _round_up(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
