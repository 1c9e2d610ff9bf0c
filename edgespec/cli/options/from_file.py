"""Options that take their values from the configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from edgespec.errors import UsageError, did_you_mean

_NUMBERS = {"float_parsing": "a number", "int_parsing": "an integer"}
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
    try:
        if isinstance(value, dict):
            raise ValueError("A single value belongs here, not a table.")
        if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
            raise ValueError("A value belongs here, not true or false.")
        # Numbers are read as on the command line, which takes 1.5 for no integer.
        text = value if isinstance(value, bool | list) else str(value)
        return parameter.process_value(typer.Context(command), text)
    except (typer.TyperException, ValueError, TypeError) as error:
        reason = message_of(error) if isinstance(error, typer.TyperException) else str(error)
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UsageError(f"{key} is {shown} in {file}.", reason) from error


def message_of(error: Any) -> str:
    """Typer's message; Pydantic's about numbers, which lack the value, in the program's own words."""
    refusals: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    wanted = _NUMBERS.get(refusals[0]["type"]) if refusals else None
    if wanted is None:
        return str(error.format_message()).replace("Value error, ", "")  # Pydantic's words
    return f"{max(error.param.opts, key=len)} must be {wanted}, not '{refusals[0]['input']}'."


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
