"""A secret of this user, by which what is kept in the cache folder does not say which tokens it is of.

It lies in another folder, for whoever gets to see a cache folder alone: caches are shared, copied and thrown
away with less care than a person's data.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from edgespec.files.user_folders import data_folder
from edgespec.files.writing import atomic_write

_BYTES = 16


def user_secret() -> bytes | None:
    """The secret, which is made at the first call; None if it cannot be kept."""
    path = _path()
    try:
        if not path.exists() or len(path.read_bytes()) != _BYTES:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(secrets.token_bytes(_BYTES))
        return path.read_bytes()  # another process may have made one at the same time
    except OSError:
        return None


def forget_secret() -> None:
    """Delete it, so that older copies of the cache folder do not say anything either.

    Raises:
        OSError: it cannot be deleted.
    """
    _path().unlink(missing_ok=True)


def _path() -> Path:
    return data_folder() / "secret"
