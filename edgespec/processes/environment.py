"""Environment variables: those that are set for a while, and those of children."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the time of the block, for what is loaded or started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this process's and `variables`, with the absolute entries of PATH alone.

    By an empty or relative one, programs such as compilers would run others that lie in the working folder.
    """
    entries = os.environ.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(os.path.isabs, entries))
    return {**os.environ, "PATH": path or os.defpath, **(variables or {})}  # an empty PATH is the folder, too
