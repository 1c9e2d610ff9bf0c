"""`edgespec config`: every setting, its value and where it comes from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import config_file as settings
from edgespec.cli.options.common import Yes, confirm_removal
from edgespec.cli.options.declaration import option
from edgespec.cli.options.from_file import checked_values, dashed, options_of, other_names, unknown
from edgespec.cli.options.sampling import RECOMMENDABLE
from edgespec.cli.screen.formatting import count, table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import EdgeSpecError, OutputError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.secret import forget_secret
from edgespec.files.writing import atomic_write, writing_to
from edgespec.generation.config import GenerationConfig
from edgespec.models.hub.external import own_folders

_FOLDERS = settings.MODELS_FOLDER.replace("_", "-")
_SECRET = ("api-key",)
_RECOMMENDED = ("chat", "run", "serve")  # commands that sample as a model's maker recommends
_DEFAULTS = vars(GenerationConfig())
# The first two must work even if the file is damaged; the others have nothing to set.
WITHOUT_SETTINGS = ("config", "doctor", "pull", "list", "show", "rm", "ps", "sessions")
_UNCHANGED = "default"
_TABLES = {"run": "chat"}  # the table of a command, where it is not named after it


_Row = tuple[str, str, str]


def config(
    context: typer.Context,
    path: Annotated[
        bool, option(None, "--path", "Print the path of the configuration file.", variable=False)
    ] = False,
    init: Annotated[
        bool,
        option(None, "--init", "Create the configuration file, with commented examples.", variable=False),
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
    everything: Annotated[
        bool, option(None, "--all", "Also list settings that have their default values.", variable=False)
    ] = False,
    as_json: Annotated[bool, option(None, "--json", "Print all settings as a JSON object.")] = False,
) -> None:
    """Show changed settings and where their values come from."""
    file, terminal = settings.config_path(), Terminal()
    if path:
        results().text(f"{file}\n")
        return
    if forget:
        if not yes:
            confirm_removal("Delete what was learned, cached prompts, file indexes and trial loads?")
        results().text(f"{_forgotten()}\n")
        return
    if init:
        _make(file)
        terminal.note(f"Created {file}; every line in it is a comment.")
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
    changed, unchanged = _rows(found)
    results().text(
        f"File: {file}{'' if file.exists() else ' (does not exist; --init creates it)'}\n"
        f"Models folder: {folders or 'none'}{'' if there else ' (does not exist)'}\n"
    )
    if presets:
        results().text(f"Presets: {', '.join(presets)}\n")
    shown = changed + unchanged if everything else changed
    if shown:
        results().text("\n" + table((), shown))
    if not everything:
        others = count(len(unchanged), f"{'other ' if changed else ''}setting")
        verb = "has its default value" if len(unchanged) == 1 else "have their default values"
        terminal.note(f"{others} {verb}; 'edgespec config --all' lists them.")


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
    for key in everywhere:
        if key not in result and dashed(key) not in known:
            raise unknown(key, key, [*known, *result], file)
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


def _variable(parameter: Any) -> str | None:
    """The environment variable that sets a parameter now, or None."""
    names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    return next((name for name in names if os.environ.get(name)), None)


def _sources(command: Any, from_file: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in options_of(command).items():
        variable = _variable(parameter)
        if variable is not None:
            found[name] = {"value": os.environ[variable], "from": f"{variable} in the environment"}
        elif parameter.name in from_file:
            found[name] = {"value": from_file[parameter.name], "from": str(file)}
        else:
            found[name] = _default(command.name, parameter)
        if name in _SECRET and found[name]["value"] is not None:
            found[name]["value"] = "(not shown)"
    return found


def _default(command: str, parameter: Any) -> dict[str, Any]:
    """A setting that was not set. Where the library decides, "default" says what it takes, in words."""
    value = parameter.default if not callable(parameter.default) else None
    if value is not None:
        return {"value": value, "from": _UNCHANGED}
    recommended = command in _RECOMMENDED and parameter.name in RECOMMENDABLE
    if parameter.name == "sampling":
        return {"value": "recommended" if command in _RECOMMENDED else "greedy", "from": _UNCHANGED}
    if recommended:
        return {"value": None, "from": _UNCHANGED, "default": "recommended"}
    if parameter.name in _DEFAULTS and _DEFAULTS[parameter.name] is not None:
        return {"value": _DEFAULTS[parameter.name], "from": _UNCHANGED}
    stated = re.search(r"Default: (.*?)\.$", parameter.help or "")
    return {"value": None, "from": _UNCHANGED} | ({"default": stated[1]} if stated else {})


def _rows(found: dict[str, dict[str, dict[str, Any]]]) -> tuple[list[_Row], list[_Row]]:
    """Rows for people: those of changed values and the others, one for each value that commands differ in."""
    changed: list[_Row] = []
    unchanged: list[_Row] = []
    for name in dict.fromkeys(name for settings_ in found.values() for name in settings_):
        commands = [command for command, settings_ in found.items() if name in settings_]
        groups: dict[tuple[str, str], list[str]] = {}
        for command in commands:
            entry = found[command][name]
            groups.setdefault((_text(entry), entry["from"]), []).append(command)
        for (value, source), its in groups.items():
            where = "" if len(groups) == 1 and len(commands) > 1 else f" ({', '.join(its)})"
            rows = unchanged if source == _UNCHANGED else changed
            rows.append((name + where, value, source))
    return changed, unchanged


def _text(entry: dict[str, Any]) -> str:
    """A setting's value for people."""
    value = entry["value"]
    if value is None or value == ():
        return str(entry.get("default", "-"))
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


def _make(file: Path) -> None:
    if os.path.lexists(file):
        raise OutputError(f"{file} already exists.", "Edit it, or move it away first.")
    with writing_to(file, settings.ELSEWHERE):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as new:  # a full disk must not leave half of it
            new.write(settings.TEMPLATE.encode())
