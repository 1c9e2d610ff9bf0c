"""`--preset NAME`: a model, a system prompt and settings under a name, a table of the configuration file."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli import config_file
from edgespec.cli.options.declaration import option
from edgespec.cli.options.from_file import checked_values
from edgespec.errors import UsageError, did_you_mean


def _use(context: typer.Context, name: str | None) -> str | None:
    """Make the values of a preset the defaults of a command."""
    if name is None or context.resilient_parsing:
        return name
    file = config_file.config_path()
    presets = config_file.presets(config_file.read_config(file))
    if name not in presets:
        hint = did_you_mean(name, presets, f"A preset is a table [presets.{name}] in {file}.")
        raise UsageError(f"There is no preset '{name}'.", hint)
    values = checked_values(context.command, presets[name], file, f"presets.{name}.")
    context.default_map = {**(context.default_map or {}), **values}
    return name


def complete_preset(incomplete: str) -> list[str]:
    """Presets for a shell."""
    presets = config_file.presets(config_file.read_config(config_file.config_path()))
    return [name for name in presets if name.startswith(incomplete)]


Preset = Annotated[
    str | None,
    option(
        "Prompt",
        "--preset",
        "Use the model, system prompt and settings of this table in the configuration file.",
        metavar="NAME",
        is_eager=True,  # before the options whose defaults it sets
        callback=_use,
        autocompletion=complete_preset,
    ),
]
