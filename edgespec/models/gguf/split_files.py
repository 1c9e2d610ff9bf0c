"""Models split over several files, by the names that llama.cpp gives the parts."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.models.gguf.types import GGUFHeader, as_count

_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def split_paths(header: GGUFHeader) -> tuple[Path, ...]:
    """All files of the model that `header` belongs to, in order; only its own if the model is not split.

    Raises:
        ModelFileError: files are missing, or this one's name does not say which part it is.
    """
    count = as_count(header.metadata.get("split.count")) or 1
    if count == 1:
        return (header.path,)
    number = (as_count(header.metadata.get("split.no")) or 0) + 1
    match = _SPLIT_NAME.fullmatch(header.path.name)
    if not match or (int(match["number"]), int(match["count"])) != (number, count):
        raise ModelFileError(
            f"{header.path} is part {number} of {count}, but its name does not end in "
            f"-{number:05d}-of-{count:05d}.gguf.",
            "Give every part of the model its published name.",
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
    """The existing files of a model, by the name of this one; nothing is read."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match:
        return (path,)
    count = int(match["count"])
    names = (f"{match['prefix']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1))
    return tuple(part for name in names if (part := path.with_name(name)).is_file()) or (path,)
