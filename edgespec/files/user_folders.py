"""EdgeSpec's folders in the user's home, and `~` in paths that people give."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import platformdirs

from edgespec.errors import UsageError

_PATH_BEGINNING = re.compile(rf"~|\.{{0,2}}[{re.escape(os.sep + (os.altsep or ''))}]|[A-Za-z]:[\\/]")


def cache_folder() -> Path:
    """The folder of what can be made again; raises UsageError if the user has no home."""
    return _folder(platformdirs.user_cache_path)


def data_folder() -> Path:
    """The folder of sessions, models and notes; raises UsageError if the user has no home."""
    return _folder(platformdirs.user_data_path)


def config_folder() -> Path:
    """The folder of the configuration file; raises UsageError if the user has no home."""
    return _folder(platformdirs.user_config_path)


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with a home folder in place of `~` or `~user`, or that of a file:// URL."""
    if os.fspath(path)[:7].lower() == "file://":
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        with suppress(ValueError):  # it is no address
            path = url2pathname(urlsplit(os.fspath(path)).path)
    with suppress(ValueError):  # the name of a user has a null character
        path = os.path.expanduser(path)  # noqa: PTH111 (Path.expanduser raises RuntimeError)
    return Path(path)


def holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about a path; False if no file can have that name, or none may look."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def begins_as_path(text: str) -> bool:
    """True if a text can be nothing but a path: with a home folder, a dot, a slash or a drive before it."""
    return _PATH_BEGINNING.match(text) is not None


def in_home(path: str) -> Path:
    """As `expanded`; raises UsageError if the path begins with the home folder and the user has none."""
    found = expanded(path)
    if found.parts[:1] == ("~",):
        raise _homeless()
    return found


def _folder(find: Callable[[str, Literal[False]], Path]) -> Path:
    try:
        return find("edgespec", False)  # Windows' folders are by author otherwise, too
    except RuntimeError as error:
        raise _homeless() from error


def _homeless() -> UsageError:
    return UsageError(
        "The home folder is unknown: HOME is not an absolute path, and the user has no entry in the system.",
        "Set HOME to a folder that you can write to.",
    )


def nearest_existing(folder: Path) -> Path:
    """A folder, or the innermost one around it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
