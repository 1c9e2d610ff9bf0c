"""Names of small files that are kept for one model each."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_stem(fingerprint: str, identity: str) -> str:
    """A file name that begins with the model, for `files_about`, and ends with a hash of the identity."""
    return f"{fingerprint[:16]}-{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"


def files_about(folder: Path, fingerprint: str) -> list[Path]:
    """The files in a folder that were named for this model by `file_stem`."""
    return sorted(folder.glob(f"{fingerprint[:16]}-*.json"))
