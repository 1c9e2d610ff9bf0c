"""GGUF headers: metadata and tensor ranges, refusing what is malformed.

A model file is untrusted input, and llama.cpp answers a bad one with a log line or an abort. So
every file is read here first. The contract: `read_header` returns a header whose every tensor lies
inside the file, or raises ModelFileError; whatever the bytes say, it ends soon and allocates no
more than the header it has walked. The rules are llama.cpp's own (`gguf.cpp`), plus limits on
counts that no real model comes near.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import mmap
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from edgespec.errors import ModelFileError
from edgespec.models.gguf.checks import find_fault
from edgespec.models.gguf.types import BLOCK_SIZES, ArrayInfo, TensorInfo

# Metadata value type id -> (name, struct format of one value). Strings and arrays have none.
_VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    8: ("string", ""),
    9: ("array", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_SCALARS = {type_id: struct.Struct("<" + code) for type_id, (_, code) in _VALUE_TYPES.items() if code}
_UINT32, _STRING, _ARRAY = 4, 8, 9

__all__ = [
    "BLOCK_SIZES",
    "ArrayInfo",
    "GGUFHeader",
    "IncompleteHeader",
    "TensorInfo",
    "read_header",
    "read_header_bytes",
    "split_paths",
]

_DEFAULT_ALIGNMENT = 32
_LEAST_ALIGNMENT = 32  # llama.cpp refuses to compute with mapped weights that lie otherwise, by an abort
_MAX_DIMS = 4
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its terminator
_INT64_MAX = 2**63 - 1

# Large vocabularies have 2.6e5 tokens and 30 MB of header, large expert models 5e4 tensors. These
# bound the work on a sparse file, whose size would justify any count.
_MAX_HEADER_BYTES = 256 * 2**20
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**19
_MAX_STRINGS = 2**23
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # key length, shortest key, type, shortest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dimension count, one dimension, type, offset

_DOWNLOAD_AGAIN = "Download the file again."
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFHeader:
    """A checked header; every tensor lies inside the file, after `data_offset`, in file order.

    Attributes:
        metadata: scalars and strings as they are, arrays as ArrayInfo.
        fingerprint: 32 hex digits over the header's bytes (metadata, names, shapes, types).
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int
    file_bytes: int
    fingerprint: str

    @property
    def architecture(self) -> str:
        """Such as "llama"; empty only in the second and later files of a split model."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def block_count(self) -> int | None:
        return self._count("block_count")

    @property
    def context_length(self) -> int | None:
        """The context the model was trained with, in tokens."""
        return self._count("context_length")

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary; 0 where the file has none."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.length if isinstance(tokens, ArrayInfo) else 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors in this file, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def _count(self, key: str) -> int | None:
        return _as_count(self.metadata.get(f"{self.architecture}.{key}"))


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of one GGUF file (of a split model: of that one file).

    Raises:
        ModelFileError: the path is no readable GGUF file, or the file is damaged.
    """
    path = Path(path)
    _require_regular_file(path)
    try:
        with path.open("rb") as file:
            if not file.peek(1):
                raise ModelFileError(f"{path} is empty.", _DOWNLOAD_AGAIN)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise _unreadable(path, error) from error


class IncompleteHeader(Exception):
    """The bytes at hand end before the header does.

    Attributes:
        needed: bytes from the file's start that are needed at the least.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def read_header_bytes(name: Path, data: bytes, file_bytes: int) -> GGUFHeader:
    """Read and check a header from the first bytes of a file that is somewhere else.

    Args:
        name: what the file is called in messages.
        data: its beginning.
        file_bytes: its whole size.

    Raises:
        IncompleteHeader: the header is longer than `data`.
        ModelFileError: the file is no GGUF, or damaged.
    """
    return _HeaderReader(name, data, file_bytes).read()


def split_paths(header: GGUFHeader) -> tuple[Path, ...]:
    """All files of the model that `header` belongs to, in order; just its own if it is not split.

    Raises:
        ModelFileError: files are missing, or this one's name does not say which part it is.
    """
    count = _as_count(header.metadata.get("split.count")) or 1
    if count == 1:
        return (header.path,)
    number = (_as_count(header.metadata.get("split.no")) or 0) + 1
    match = _SPLIT_NAME.fullmatch(header.path.name)
    if not match or (int(match["number"]), int(match["count"])) != (number, count):
        raise ModelFileError(
            f"{header.path} is part {number} of {count}, but its name does not end in "
            f"-{number:05d}-of-{count:05d}.gguf.",
            "Give every part of the model the name it was published with.",
        )
    names = [f"{match['prefix']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    paths = tuple(header.path.with_name(name) for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFileError(
            f"{header.path} is part {number} of {count}; missing: {', '.join(missing[:3])}{more}.",
            f"Put every part into {header.path.parent}.",
        )
    return paths


def parts_by_name(path: Path) -> tuple[Path, ...]:
    """The files of a model that are there, as far as this one's name tells; nothing is read."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match:
        return (path,)
    count = int(match["count"])
    names = (f"{match['prefix']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1))
    return tuple(part for name in names if (part := path.with_name(name)).is_file()) or (path,)


class _HeaderReader:
    """A cursor over the mapped file, or over its beginning. Each step checks its bounds before it reads."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int | None = None) -> None:
        self._path = path
        self._data = data
        self._size = len(data) if size is None else size
        self._at = 0
        self._missing_byte: int | None = None  # that no token stands for

    def read(self) -> GGUFHeader:
        version = self._read_version()
        tensor_count = self._read_count("tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
        entry_count = self._read_count("metadata entries", _MIN_ENTRY_BYTES, _MAX_ENTRIES)
        metadata = self._read_metadata(entry_count)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {alignment}, which is not a power of two")
        if alignment < _LEAST_ALIGNMENT:
            self._damaged(f"general.alignment is {alignment}; weights need {_LEAST_ALIGNMENT}")
        architecture = metadata.get("general.architecture")
        if not (isinstance(architecture, str) and architecture) and not metadata.get("split.no"):
            self._damaged("its metadata has no general.architecture")
        relative = self._read_tensors(tensor_count, alignment)
        fault = find_fault(metadata, relative) or self._byte_fault(metadata)
        if fault:
            self._damaged(fault)
        data_offset = _round_up(self._at, alignment)
        tensors = tuple(replace(t, offset=data_offset + t.offset) for t in relative)
        if tensors:
            self._require_size(tensors[-1].offset + tensors[-1].n_bytes, "its tensors")
        return GGUFHeader(
            path=self._path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            alignment=alignment,
            data_offset=data_offset,
            file_bytes=self._size,
            fingerprint=self._fingerprint(),
        )

    def _read_version(self) -> int:
        if len(self._data) < 4 <= self._size:
            raise IncompleteHeader(4)
        if self._data[:4] != b"GGUF":
            raise ModelFileError(
                f"{self._path} is not a GGUF file: {_describe(self._data[:512])}.",
                "EdgeSpec runs GGUF models; give it a file whose name ends in .gguf.",
            )
        self._at = 4
        version = int(self._scalar(_UINT32, "its version"))
        if version & 0xFFFF == 0 and version:
            raise ModelFileError(f"{self._path} is a big-endian GGUF file.", "Get the little-endian file.")
        if version not in (2, 3):
            raise ModelFileError(
                f"{self._path} has GGUF version {version}; versions 2 and 3 can be read.",
                "Get a newer conversion of the model."
                if version == 1
                else "Update EdgeSpec, or get another conversion of the model.",
            )
        return version

    def _read_count(self, what: str, min_bytes: int, most: int) -> int:
        count = int(self._scalar(10, f"its number of {what}"))
        if count > most:
            self._damaged(f"it claims {count:,} {what}; at most {most:,} make sense")
        self._require_size(self._at + count * min_bytes, f"its {count:,} {what}")
        return count

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        strings_left = _MAX_STRINGS
        for index in range(count):
            key = self._name(f"metadata key {index}")
            if not key:
                self._damaged(f"metadata key {index} is empty")
            if key in metadata:
                self._damaged(f"metadata key {_quote(key)} appears twice")
            type_id = self._scalar(_UINT32, f"metadata {_quote(key)}")
            if key == "general.alignment" and type_id != _UINT32:
                self._damaged(f"general.alignment has value type {type_id} instead of uint32")
            value = self._value(type_id, f"metadata {_quote(key)}")
            if isinstance(value, ArrayInfo) and value.element_type == "string":
                start = self._at
                strings_left -= self._skip_strings(value.length, strings_left, _quote(key))
                if key == "tokenizer.ggml.tokens":
                    self._check_tokens(start, value.length)
            metadata[key] = value
        return metadata

    def _value(self, type_id: int, where: str) -> Any:
        """One metadata value; of an array of strings, only its length (the strings follow)."""
        if type_id == _STRING:
            return self._bytes(where).decode("utf-8", "replace")
        if type_id in _SCALARS:
            return self._scalar(type_id, where)
        if type_id != _ARRAY:
            self._damaged(f"{where} has unknown value type {type_id}")
        element_id = self._scalar(_UINT32, where)
        length = self._scalar(10, where)
        if element_id == _ARRAY:
            self._damaged(f"{where} is an array of arrays, which llama.cpp does not read")
        if element_id not in _VALUE_TYPES:
            self._damaged(f"{where} is an array of unknown value type {element_id}")
        if element_id in _SCALARS:
            self._advance(length * _SCALARS[element_id].size, where)
        return ArrayInfo(_VALUE_TYPES[element_id][0], length)

    def _skip_strings(self, count: int, most: int, key: str) -> int:
        where = f"metadata {key}"
        self._require_size(self._at + count * 8, where)
        if count > most:
            self._damaged(f"{where} has {count:,} strings; at most {_MAX_STRINGS:,} make sense")
        unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        last = min(len(data), _MAX_HEADER_BYTES) - 8
        for _ in range(count):  # the one long loop: a vocabulary
            if at > last:
                self._advance(at + 8 - self._at, where)  # raises: there is no such byte
            at += 8 + unpack(data, at)[0]
        self._advance(at - self._at, where)
        return count

    def _check_tokens(self, at: int, count: int) -> None:
        """Tokens must differ: llama.cpp ends the process over two that are the same."""
        unpack, data = struct.Struct("<Q").unpack_from, self._data
        seen: set[bytes] = set()
        named = 0
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            text = data[start:at].partition(b"\0")[0]  # llama.cpp reads C strings
            if text:  # it gives empty ones names of their own
                named += 1
                seen.add(text)
                if len(seen) < named:
                    self._damaged(f"its vocabulary has the token {text[:40]!r} twice")
        self._missing_byte = next(
            (byte for byte in range(256) if not seen & {b"<0x%02X>" % byte, bytes([byte])}), None
        )

    def _byte_fault(self, metadata: dict[str, Any]) -> str:
        """A SentencePiece vocabulary must spell every byte: llama.cpp looks them up without asking."""
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
                self._damaged(f"{label} appears twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                self._damaged(f"{label} is at offset {tensor.offset}, no multiple of {alignment}")
            if tensor.offset != expected:
                fault = "overlaps the one before it" if tensor.offset < expected else "leaves a gap"
                self._damaged(f"{label} {fault}: it is at offset {tensor.offset} instead of {expected}")
            expected = _round_up(expected + tensor.n_bytes, alignment)
            tensors.append(tensor)
        return tensors

    def _read_tensor(self, index: int) -> TensorInfo:
        name = self._name(f"tensor name {index}")
        label = f"tensor {_quote(name)}"
        if len(name.encode()) > _MAX_NAME_BYTES:
            self._damaged(f"{label} has a name longer than {_MAX_NAME_BYTES} bytes")
        dims = int(self._scalar(_UINT32, label))
        if not 1 <= dims <= _MAX_DIMS:
            self._damaged(f"{label} has {dims} dimensions")
        shape = tuple(int(self._scalar(11, label)) for _ in range(dims))
        if min(shape) <= 0 or math.prod(shape) > _INT64_MAX:
            self._damaged(f"{label} has the impossible shape {list(shape)}")
        type_id = int(self._scalar(_UINT32, label))
        if type_id not in BLOCK_SIZES:
            self._damaged(f"{label} has unknown type {type_id}")
        elements, block_bytes = BLOCK_SIZES[type_id]
        if shape[0] % elements:
            self._damaged(f"{label} has rows of {shape[0]}, no multiple of its block of {elements}")
        offset = int(self._scalar(10, label))
        return TensorInfo(name, shape, type_id, offset, math.prod(shape) // elements * block_bytes)

    def _name(self, where: str) -> str:
        try:
            return self._bytes(where).decode("utf-8")
        except UnicodeDecodeError:
            self._damaged(f"{where} is not UTF-8")

    def _bytes(self, where: str) -> bytes:
        length = int(self._scalar(10, where))
        start = self._at
        self._advance(length, where)
        return self._data[start : self._at]

    def _scalar(self, type_id: int, where: str) -> Any:
        layout = _SCALARS[type_id]
        start = self._at
        self._advance(layout.size, where)
        return layout.unpack_from(self._data, start)[0]

    def _advance(self, count: int, where: str) -> None:
        end = self._at + count
        self._require_size(end, where)
        if end > _MAX_HEADER_BYTES:
            self._damaged(f"{where} makes its header longer than {_MAX_HEADER_BYTES >> 20} MiB")
        if end > len(self._data):
            raise IncompleteHeader(end)
        self._at = end

    def _require_size(self, needed: int, where: str) -> None:
        if needed > self._size:
            raise ModelFileError(
                f"{self._path} is cut short or damaged: it has {self._size:,} bytes, "
                f"but its header calls for at least {needed:,} ({where}).",
                _DOWNLOAD_AGAIN,
            )

    def _damaged(self, why: str) -> NoReturn:
        raise ModelFileError(f"{self._path} is damaged: {why}.", _DOWNLOAD_AGAIN)

    def _fingerprint(self) -> str:
        with memoryview(self._data) as view, view[: self._at] as header:
            return hashlib.blake2b(header, digest_size=16).hexdigest()


def _require_regular_file(path: Path) -> None:
    # Before opening: a pipe would block there, and a device never ends.
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_found(path) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        models = _gguf_names(path)
        raise ModelFileError(
            f"{path} is a folder, not a model file.",
            f"In it: {', '.join(models[:3])}." if models else "Name a .gguf file.",
        )
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path} is not a regular file.", "Name a .gguf file.")


def _not_found(path: Path) -> ModelFileError:
    near = difflib.get_close_matches(path.name, _gguf_names(path.parent), n=3, cutoff=0.0)
    return ModelFileError(
        f"{path} does not exist.",
        f"Did you mean {' or '.join(near)}?" if near else "Check the path.",
    )


def _unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = getattr(error, "strerror", None) or str(error)
    return ModelFileError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.")


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() == ".gguf")
    except OSError:
        return []


def _describe(head: bytes) -> str:
    """What a file that is no GGUF looks like, for the message."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, so the real file was not downloaded"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is a web page, so the download went wrong"
    if head[8:9] == b"{":
        return "it looks like safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip archive, perhaps a PyTorch checkpoint"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it is in the GGML format that came before GGUF"
    return f"it begins with {head[:4]!r}"


def _quote(name: str) -> str:
    # repr, because a name from the file could otherwise carry terminal control sequences.
    return repr(name if len(name) <= 64 else name[:61] + "...")


def _as_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _round_up(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
