"""The program's environment variables, and a warning about others that look like them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from edgespec.cli.config_file import VARIABLE as CONFIG
from edgespec.errors import similar
from edgespec.models.hub.external import FOLDERS

_PREFIX = "EDGESPEC_"


def variable_of(flag: str) -> str:
    """The environment variable of an option."""
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def warn_about_unknown(commands: Mapping[str, Any], called: str) -> None:
    """Warn about variables that no command reads: their names may be misspelled.

    Args:
        commands: all commands by name; each is imported only if the variables before it are not enough.
        called: the name of the one that runs.
    """
    unknown = {name for name, value in os.environ.items() if name.startswith(_PREFIX) and value}
    if not unknown:
        return
    known = set()
    for name in _known(commands, called):
        known.add(name)
        unknown.discard(name)
        if not unknown:
            return
    from edgespec.cli.screen.terminal import Terminal

    names = [name.removeprefix(_PREFIX) for name in known]
    named = []
    for name in sorted(unknown):
        near = similar(name.removeprefix(_PREFIX), names)
        named.append(f"{name} (did you mean {_PREFIX}{near[0]}?)" if near else name)
    Terminal().warn(f"Ignored unknown environment variable{'s'[: len(named) > 1]} {', '.join(named)}.")


def _known(commands: Mapping[str, Any], called: str) -> Iterator[str]:
    """Every variable, beginning with those that are found without importing further commands."""
    from edgespec.config import OPTIONS
    from edgespec.kernels.setting import VARIABLE as KERNELS

    yield from (CONFIG, KERNELS, FOLDERS)
    yield from map(variable_of, OPTIONS)
    for command in sorted(commands, key=lambda name: name != called):
        for parameter in _parameters([commands[command]]):
            names = parameter.envvar or ()
            yield from (names,) if isinstance(names, str) else names


def _parameters(commands: Iterable[Any]) -> Iterator[Any]:
    """The parameters of commands, and of those in groups of commands."""
    for command in commands:
        yield from command.params
        yield from _parameters(getattr(command, "commands", {}).values())
