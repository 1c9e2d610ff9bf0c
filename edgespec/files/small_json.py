"""Small JSON files of what can be found again: one that cannot be read counts as missing."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgespec.files.writing import atomic_write

_T = TypeVar("_T")

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading JSON raises that has another form than is expected."""


def read_json(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    """The value in a file; None if the file is missing, damaged or not what `parse` expects."""
    try:
        return parse(json.loads(path.read_bytes()))
    except (OSError, *MALFORMED):
        return None


def save_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value for later runs; if that fails, they find it again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(json.dumps(value, indent=indent).encode())


def remembered(
    path: Path, parse: Callable[[Any], _T], find: Callable[[], _T], encode: Callable[[_T], Any]
) -> _T:
    """The outcome of a trial: read from its file, or found now and saved there.

    Only what `find` returns is saved. A trial that proves nothing raises `errors.InconclusiveTrial`, which is
    passed on.

    Args:
        parse, encode: convert from JSON and to JSON.
    """
    known = read_json(path, parse)
    if known is None:
        known = find()
        save_json(path, encode(known))
    return known


def file_stem(fingerprint: str, identity: str) -> str:
    """A file name that begins with the model, for `files_about`, and ends with a hash of the identity."""
    return f"{fingerprint[:16]}-{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"


def files_about(folder: Path, fingerprint: str) -> list[Path]:
    """The files in a folder that were named for this model by `file_stem`."""
    return sorted(folder.glob(f"{fingerprint[:16]}-*.json"))
