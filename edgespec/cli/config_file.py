"""Values for options that are not given on the command line: environment variables, and a file.

    # ~/.config/edgespec/config.toml, or the platform's place for it
    memory = "12GiB"
    temperature = 0.7

    models_folder = "/models"

    [chat]
    system = "Be brief."

    [presets.reviewer]
    model = "qwen3-8b"
    system = "You review code."

Names are those of the options. Values at the top apply to every command that has the option, those in a table
to one command, and those of a preset where `--preset NAME` asks for it. Flags precede environment
variables, these over a preset, and a preset over the rest of the file. `models_folder`, a folder or a list of
them, is no option: it says where more models are.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.files.user_folders import config_folder, expanded
from edgespec.models.hub.external import FOLDERS

VARIABLE = "EDGESPEC_CONFIG"
MODELS_FOLDER = "models_folder"
PRESETS = "presets"


def config_path() -> Path:
    """Return the path of the file: EDGESPEC_CONFIG, or the platform's place."""
    named = os.environ.get(VARIABLE)
    if named:
        return expanded(named)

    return config_folder() / "config.toml"


def is_named() -> bool:
    """True if EDGESPEC_CONFIG names the file, which then has to exist."""
    return bool(os.environ.get(VARIABLE))


def use_models_folder() -> None:
    """Set EDGESPEC_MODELS_FOLDER to the folders in the file, unless it is set."""
    if FOLDERS in os.environ:
        return
    folders = models_folders(read_config(config_path()))
    if folders:
        os.environ[FOLDERS] = os.pathsep.join(folders)


def models_folders(values: dict[str, Any]) -> list[str]:
    """The value of `models_folder`, as a list; raises UsageError if it has another form."""
    value = values.get(MODELS_FOLDER, values.get(MODELS_FOLDER.replace("_", "-"), []))
    folders = [value] if isinstance(value, str) else value
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise UsageError(
            f"{MODELS_FOLDER} must be a folder or a list of folders, not {value!r} in {config_path()}."
        )
    return folders


def presets(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables `[presets.NAME]` by name; raises UsageError if something else is there."""
    tables = values.get(PRESETS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(
            f"Presets must be tables in {config_path()}.",
            "Begin each with a line such as [presets.reviewer].",
        )
    return tables


def read_config(path: Path) -> dict[str, Any]:
    """The values in the file; empty if there is none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_named():
            raise UsageError(
                f"EDGESPEC_CONFIG names {path}, which does not exist.",
                "Correct it, unset it, or create the file.",
            ) from error
        return {}
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            f"Correct it, or set {VARIABLE} to another file; {os.devnull} is an empty one.",
        ) from error
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # programs on Windows write a mark
    except ValueError as error:
        hint = r" Paths with \ belong in single quotes." if b"\\" in data else ""
        raise UsageError(
            f"{path} is not valid TOML: {error}.", f"Correct it, or move it away.{hint}"
        ) from error


_PREFIX = "EDGESPEC_"


def variable_of(flag: str) -> str:
    """The environment variable of an option."""
    return _PREFIX + flag.removeprefix("--").replace("-", "_").upper()
