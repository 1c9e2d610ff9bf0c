"""`edgespec config`: the settings that were changed, and where their values come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import config_file as settings
from edgespec.cli.options.common import Yes, confirm_removal
from edgespec.cli.options.declaration import option
from edgespec.cli.options.from_file import (
    checked_values,
    dashed,
    options_of,
    other_names,
    unknown,
    variable_used,
)
from edgespec.cli.screen.formatting import count, table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import EdgeSpecError, OutputError, UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.secret import forget_secret
from edgespec.models.hub.external import own_folders
from edgespec.printable import shown

_FOLDERS = settings.MODELS_FOLDER.replace("_", "-")
_SECRET = ("api-key",)
# The first two must work even if the file is damaged; the others have nothing to set.
WITHOUT_SETTINGS = ("config", "doctor", "pull", "list", "show", "rm", "sessions")
_TABLES = {"run": "chat"}  # the table of a command, where it is not named after it


def config(
    context: typer.Context,
    path: Annotated[
        bool, option(None, "--path", "Print the path of the configuration file.", variable=False)
    ] = False,
    forget: Annotated[
        bool,
        option(
            None,
            "--forget",
            "Delete what was learned from texts, cached prompts, file indexes, and the "
            "outcomes of trial loads.",
            variable=False,
        ),
    ] = False,
    yes: Yes = False,
    as_json: Annotated[bool, option(None, "--json", "Print a JSON object.")] = False,
) -> None:
    """Show changed settings and where their values come from."""
    file = settings.config_path()
    if path:
        results().text(f"{file}\n")
        return
    if forget:
        if not yes:
            confirm_removal("Delete what was learned, cached prompts, file indexes and trial loads?")
        results().text(f"{_forgotten()}\n")
        return
    assert context.parent is not None
    commands: Any = context.parent.command
    values = defaults_from(file, commands.commands)
    settings.use_models_folder()
    found = {name: _sources(commands.commands[name], values[name], file) for name in values}
    presets = settings.presets(settings.read_config(file))
    folders = os.pathsep.join(map(str, own_folders()))
    if as_json:
        record = {"file": str(file), _FOLDERS: folders or None, "presets": [*presets], "settings": found}
        results().record(record)
        return
    there = any(folder.is_dir() for folder in own_folders())
    changed = _rows(found)
    results().text(
        f"File: {file}{'' if file.exists() else ' (does not exist)'}\n"
        f"Models folder: {folders or 'none'}{'' if there else ' (does not exist)'}\n"
    )
    if presets:
        results().text(f"Presets: {', '.join(presets)}\n")
    if changed:
        results().text("\n" + table((), changed))
    else:
        Terminal().note("All settings have their default values.")


def defaults_from(file: Path, commands: Any) -> dict[str, dict[str, Any]]:
    """The values in the file by command and parameter, as the `default_map` of the command line."""
    everywhere = settings.read_config(file)
    settings.models_folders(everywhere)
    settings.presets(everywhere)
    everywhere = {k: v for k, v in everywhere.items() if dashed(k) not in (_FOLDERS, settings.PRESETS)}
    result: dict[str, dict[str, Any]] = {}
    for name, command in commands.items():
        if name in WITHOUT_SETTINGS:
            continue
        own = everywhere.get(_TABLES.get(name, name), {})
        own = own if isinstance(own, dict) else {}
        known = options_of(command).keys() | other_names(command).keys()
        given = {key: value for key, value in everywhere.items() if dashed(key) in known} | own
        result[name] = checked_values(command, given, file, f"{name}.")
    known = {key for name in result for key in options_of(commands[name]) | other_names(commands[name])}
    for key, value in everywhere.items():
        if dashed(key) in known:
            continue
        if key not in result:
            raise unknown(key, key, [*known, *result], file)
        if not isinstance(value, dict):
            raise UsageError(f"{key} must be a table, not {shown(value)}.", f"It is set in {file}.")
    return result


def settings_problem(context: typer.Context) -> EdgeSpecError | None:
    """Return the fault of the configuration file; None if it is valid."""
    assert context.parent is not None
    commands: Any = context.parent.command
    try:
        defaults_from(settings.config_path(), commands.commands)
    except EdgeSpecError as error:
        return error
    return None


def _sources(command: Any, from_file: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in options_of(command).items():
        variable = variable_used(parameter)
        if variable is not None:
            found[name] = {"value": os.environ[variable], "from": f"{variable} in the environment"}
        elif parameter.name in from_file:
            found[name] = {"value": from_file[parameter.name], "from": str(file)}
        if name in found and name in _SECRET:
            found[name]["value"] = "(not shown)"
    return found


def _rows(found: dict[str, dict[str, dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """A row for each value of a setting, with the commands that have it where others have another one."""
    rows: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(name for its in found.values() for name in its):
        groups: dict[tuple[str, str], list[str]] = {}
        for command, its in found.items():
            if name in its:
                groups.setdefault((_text(its[name]["value"]), its[name]["from"]), []).append(command)
        for (value, source), commands in groups.items():
            where = "" if len(groups) == 1 and len(commands) > 1 else f" ({', '.join(commands)})"
            rows.append((name + where, value, source))
    return rows


def _text(value: Any) -> str:
    """A setting's value for people."""
    if isinstance(value, bool):
        return ("no", "yes")[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _forgotten() -> str:
    """Delete what is kept of texts and trial loads to make later runs faster, and say what it was."""
    try:
        kinds = (
            CacheKind.LEARNED,
            CacheKind.FILES,
            CacheKind.PROMPTS,
            CacheKind.TRIALS,
        )
        learned, indexes, prompts, trials = (kind.forget() for kind in kinds)
        forget_secret()
    except OSError as error:
        raise OutputError(
            f"Cannot delete {error.filename}: {error.strerror}.", "Delete it by hand."
        ) from error
    return (
        f"Deleted: what was learned about {count(learned, 'pair')} of models, "
        f"{count(indexes, 'index', 'indexes')} of files, {count(prompts, 'state')} of prompts, "
        f"and the outcomes of {count(trials, 'trial load')}."
    )
