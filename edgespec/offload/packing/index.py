"""The index of a packed layer file, which is as much as finding, listing and removing its parts takes.

What else is in the file, and in its parts, see `offload.packing.pack`.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.files.state import size_of
from edgespec.files.user_folders import cache_folder
from edgespec.files.writing import remove_abandoned

MAGIC = b"EDGEPACK"
VERSION = 3
HEAD = struct.Struct("<8sIQQI")


class StalePack(Exception):
    """A packed file that is damaged, or of another model, build or CPU; the text says which."""


def read_index(pack: Path) -> dict[str, Any]:
    """The index of a packed file.

    Raises:
        StalePack: it has another format, or is damaged.
        OSError, ValueError, struct.error: it cannot be read.
    """
    with pack.open("rb") as file:
        magic, version, at, size, checksum = HEAD.unpack(file.read(HEAD.size))
        if magic != MAGIC or version != VERSION:
            raise StalePack(f"{pack.name} has another format")
        n_bytes = os.fstat(file.fileno()).st_size
        if at + size != n_bytes:
            raise StalePack(f"{pack.name} is damaged: it has {n_bytes} bytes instead of {at + size}")
        file.seek(at)
        raw = file.read(size)
    if zlib.crc32(raw) != checksum:
        raise StalePack(f"{pack.name} is damaged: its index does not match its checksum")
    index: dict[str, Any] = json.loads(raw)
    return index


def packs_folder() -> Path:
    """The folder of packed layer files."""
    return cache_folder() / "packs"


def part_path(pack: Path, folder: Path) -> Path:
    """The path of a pack's part in a folder."""
    return folder / f"{pack.name}.part"


def indexed_parts(index: Mapping[str, Any]) -> tuple[Path, ...]:
    """The parts that an index names; none if the packed file itself has the layers."""
    return tuple(Path(part["path"]) for part in index.get("parts", ()))


def parts_of(pack: Path) -> tuple[Path, ...]:
    """The parts in other folders that a packed file has; none if it is damaged or absent."""
    try:
        return indexed_parts(read_index(pack))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, StalePack):
        return ()


@dataclass(frozen=True)
class PackedFile:
    """A packed layer file on this machine."""

    path: Path
    n_bytes: int  # with its parts
    parts: tuple[Path, ...]  # in other folders

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "bytes": self.n_bytes,
            "parts": [str(part) for part in self.parts],
        }


def packed_files() -> list[PackedFile]:
    """All packed layer files; removes what was left half-written, which may be as large as a model."""
    remove_abandoned(packs_folder())
    found = []
    for path in sorted(packs_folder().glob("*.pack")):
        parts = parts_of(path)
        found.append(PackedFile(path, sum(map(size_of, parts), size_of(path)), parts))
    return found


def remove_pack(pack: Path) -> None:
    """Remove a packed file with its parts, as far as their disks are there.

    Raises:
        OSError: the packed file cannot be removed.
    """
    for part in parts_of(pack):
        with suppress(OSError):
            part.unlink()
    pack.unlink(missing_ok=True)
