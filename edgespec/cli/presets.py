"""Presets: a model, a system prompt and settings under a name, for --preset NAME.

Each is a TOML file in the folder `presets` beside the configuration file, written like it:

    # ~/.config/edgespec/presets/reviewer.toml
    model = "qwen3-8b"
    system = "You review code."
    temperature = 0.2

Options and environment variables take precedence over a preset, and a preset over the configuration file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import config_file
from edgespec.cli.options.declaration import option
from edgespec.cli.options.from_file import checked_values
from edgespec.errors import UsageError, did_you_mean
from edgespec.files.writing import atomic_write, writing_to

_NAME = re.compile(r"\w[\w.-]{0,63}")


def folder() -> Path:
    """Return the folder of presets."""
    return config_file.config_path().parent / "presets"


def names() -> list[str]:
    """The names of the presets."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def path_of(name: str) -> Path:
    """The file of a preset, whether it exists or not.

    Raises:
        UsageError: that cannot be a name, or a value cannot be saved.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a valid preset name.", "Use letters, digits, '.', '-' and '_'.")
    return folder() / f"{name}.toml"


def existing(name: str) -> Path:
    """The file of a preset.

    Raises:
        UsageError: there is none of that name.
    """
    path = path_of(name)
    if not path.is_file():
        hint = did_you_mean(name, names(), "'edgespec presets list' lists them.")
        raise UsageError(f"There is no preset '{name}'.", hint)
    return path


def read(name: str) -> dict[str, Any]:
    """The values of a preset, by the names of the options.

    Raises:
        UsageError: there is no such preset, or its file is damaged.
    """
    path = existing(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read the preset {path}: {error}.", "Correct it, or remove it.") from error


def write(name: str, values: Mapping[str, Any]) -> Path:
    """Write a preset; returns its file.

    Raises:
        UsageError: that cannot be a name.
        OutputError: the file cannot be written.
    """
    path = path_of(name)
    text = "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "A preset holds valid UTF-8 only, and the name of a file among these values is none.",
            "Rename that file.",
        ) from error
    with writing_to(path, config_file.ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(data)
    return path


def _toml(value: Any) -> str:
    """A value as TOML writes it; its strings are those of JSON, except for one character."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _use(context: typer.Context, name: str | None) -> str | None:
    """Make the values of a preset the defaults of a command."""
    if name is None or context.resilient_parsing:
        return name
    values = checked_values(context.command, read(name), path_of(name))
    context.default_map = {**(context.default_map or {}), **values}
    return name


def complete_preset(incomplete: str) -> list[str]:
    """Presets for a shell."""
    return [name for name in names() if name.startswith(incomplete)]


Preset = Annotated[
    str | None,
    option(
        "Prompt",
        "--preset",
        "Use the model, system prompt and settings saved under this name.",
        metavar="NAME",
        is_eager=True,  # before the options whose defaults it sets
        callback=_use,
        autocompletion=complete_preset,
    ),
]
