"""Declares options, each with its environment variable, and groups of options that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_type_hints

import typer

from edgespec.cli.completion import complete_words


def option(panel: str | None, flags: str, help_text: str = "", *, variable: bool = True, **more: Any) -> Any:
    """An option, with an environment variable named after it: --tree-budget is EDGESPEC_TREE_BUDGET.

    Args:
        panel: the heading of `--help` under which it is listed; None is the general one.
        flags: the flag, or several, separated by spaces; the last one is the option's name, which messages,
            variables and the configuration file use. The others are short forms and names from elsewhere.
        variable: False for options of a single run, such as the name of its output file, and for those that
            must be confirmed each time. A variable that is set once for all commands could overwrite or
            remove a file that nobody named.
    """
    if variable:
        more = {"envvar": variable_of(flags.split()[-1].split("/")[0]), "show_envvar": False} | more
    words = [word for word in str(more.get("metavar", "")).split("|") if word.islower()]
    if "|" in str(more.get("metavar", "")) and words and "autocompletion" not in more:
        more["autocompletion"] = complete_words(*words)
    return typer.Option(*flags.split(), help=help_text or None, rich_help_panel=panel, **more)


def variable_of(flag: str) -> str:
    """The environment variable of an option."""
    return f"EDGESPEC_{flag.removeprefix('--').replace('-', '_').upper()}"


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by the environment or the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_options(command: Callable[..., None], leave_out: Collection[str] = ()) -> Callable[..., None]:
    """Let a command take groups of options as parameters; the groups come after its own options.

    Args:
        leave_out: fields of the groups that are not options of this command; they keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return")
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in _taken(group, leave_out)
        ]

    def run(**values: Any) -> None:
        filled = {
            name: group(**{field.name: values.pop(field.name) for field in _taken(group, leave_out)})
            for name, group in groups.items()
        }
        command(**values, **filled)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _taken(group: Any, leave_out: Collection[str]) -> list[Field[Any]]:
    return [field for field in fields(group) if field.name not in leave_out]
