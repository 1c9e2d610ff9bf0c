"""Options that take their values from the configuration file, and where a wrong value came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from edgespec.base.option import Texts
from edgespec.cli.config_file import config_path
from edgespec.config import OPTIONS
from edgespec.errors import ContradictionError, UsageError, did_you_mean
from edgespec.printable import shown as written

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
# Options that belong to a single run.
_NOT_SETTINGS = {
    "prompt",
    "word",
    "words",
    "input_name",
    "output_name",
    "overwrite",
    "answers",
    "session",
    "log",
}
# Options of `bench` that share a name with others but mean something else.
_NOT_SETTINGS |= {"json_name", "html_name", "tree_budgets", "model_flag", "compare"}
_NOT_SETTINGS |= {"files"}


def checked_values(command: Any, given: dict[str, Any], file: Path, table: str = "") -> dict[str, Any]:
    """Values from a file, by the parameters of a command.

    Args:
        given: by the names of options, long or short.
        table: prefix of names in messages.
    """
    options, others = options_of(command), other_names(command)
    values: dict[str, Any] = {}
    for key, value in given.items():
        parameter = options.get(dashed(key)) or others.get(dashed(key))
        if parameter is None:
            raise unknown(f"{table}{key}", key, list(options), file)
        values[parameter.name] = _checked(command, parameter, key, value, file)
    return values


def _checked(command: Any, parameter: Any, key: str, value: Any, file: Path) -> Any:
    declared = OPTIONS.get(parameter.name)
    strings = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if parameter.multiple:
        wanted, fits = "a list of strings", strings
    else:
        if strings and declared and isinstance(declared.values, Texts):
            value = ",".join(value)
        wanted = declared.values.wanted if declared else _KINDS[parameter.type_descriptor.annotation]
        other = list | dict if wanted == _KINDS[bool] else list | dict | bool
        fits = not isinstance(value, other)
    try:
        if not fits:
            raise TypeError
        # Numbers are read as on the command line, which takes 1.5 for no integer.
        text = value if isinstance(value, bool | list) else str(value)
        return parameter.process_value(typer.Context(command), text)
    except (typer.TyperException, ValueError, TypeError) as error:
        shown = str(value).lower() if isinstance(value, bool) else written(value)
        raise UsageError(f"{key} must be {wanted}, not {shown}.", f"It is set in {file}.") from error


def message_of(error: Any) -> str:
    """Typer's message; Pydantic's about the type of a value in the program's own words."""
    refusals: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    wanted = _KINDS.get(error.param.type_descriptor.annotation) if refusals else None
    if wanted is None:
        return str(error.format_message()).replace("Value error, ", "")  # Pydantic's words
    name = max(error.param.opts, key=len)
    if error.ctx.get_parameter_source(error.param.name).name == "ENVIRONMENT":
        name = variable_used(error.param) or name
    return f"{name} must be {wanted}, not {written(refusals[0]['input'])}."


def say_source(error: UsageError, context: typer.Context) -> None:
    """Have the error about an option's value name the variable or the file that the value came from."""
    flag, _, fault = error.what.partition(" ")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if flag in parameter.opts and source is not None and not isinstance(error, ContradictionError):
            variable = variable_used(parameter)
            if source.name == "ENVIRONMENT" and variable:
                error.what = f"{variable} {fault}"
            elif source.name == "DEFAULT_MAP":
                error.hint = f"{error.hint} It is set in {config_path()}.".lstrip()


def variable_used(parameter: Any) -> str | None:
    """The environment variable that sets a parameter now, or None."""
    names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    return next((name for name in names if os.environ.get(name)), None)


def unknown(shown: str, key: str, known: list[str], file: Path) -> UsageError:
    """The error for a name in a file that is not that of an option."""
    hint = did_you_mean(dashed(key), known, "Names are those of the options; see 'edgespec chat --help'.")
    return UsageError(f"{file} sets '{shown}', but there is no such setting.", hint)


def dashed(name: str) -> str:
    """A name as options are written."""
    return name.replace("_", "-")


def options_of(command: Any) -> dict[str, Any]:
    """The parameters of a command that a file may set, by the name of the option."""
    return {
        parameter.opts[-1].removeprefix("--"): parameter
        for parameter in command.params
        if parameter.name not in _NOT_SETTINGS | {"help"} and not parameter.is_eager
    }


def other_names(command: Any) -> dict[str, Any]:
    """Map parameters' other long names, such as "temp", to the parameters."""
    return {
        name.removeprefix("--"): parameter
        for parameter in options_of(command).values()
        for name in parameter.opts[:-1]
        if name.startswith("--")
    }
