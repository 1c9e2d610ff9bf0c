"""Declares options, each with its environment variable, and groups of options that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer

from edgespec.cli.completion import complete_draft, complete_model, complete_words
from edgespec.cli.config_file import variable_of
from edgespec.config import OPTIONS, TREES, Config, heading_of
from edgespec.errors import ContradictionError


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


def command_group(name: str, help_text: str) -> typer.Typer:
    """A group of commands, which shows its help if none of them is named."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(name=name, help=help_text, no_args_is_help=True, context_settings=names)


Json = Annotated[bool, option(None, "--json", "Print JSON.")]
Quiet = Annotated[bool, option(None, "--quiet", "Print only results and errors.")]


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """True for a parameter given on the command line, not by the environment or the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_given(context: typer.Context, name: str) -> bool:
    """True for a parameter on the command line, in the environment or in the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


_ITS_GROUP = "its group"
_CONTEXT = "context_of_call"


def config_option(name: str, *, panel: str | None = _ITS_GROUP, help_text: str = "", **more: Any) -> Any:
    """An option of `Config` as an option of the command line; the model is an argument.

    Args:
        name: as an argument of `edgespec.load`.
        panel, help_text, more: where the option means something else to a command; see `option`.
    """
    declared = OPTIONS[name]
    more = _COMPLETED.get(name, {}) | {"metavar": declared.metavar or declared.values.metavar or None} | more
    help_text = help_text or declared.help
    if not declared.flags:
        return typer.Argument(help=help_text, envvar=variable_of(name), show_envvar=False, **more)
    if declared.values.typed is bool:
        more["show_default"] = False
    return option(heading_of(name) if panel == _ITS_GROUP else panel, declared.flags, help_text, **more)


_COMPLETED: dict[str, dict[str, Any]] = {
    "model": {"autocompletion": complete_model},
    "draft": {"autocompletion": complete_draft},
    "tree": {"autocompletion": complete_words(*TREES)},
}


def with_options(
    command: Callable[..., None], leave_out: Collection[str] = (), defaults: Config | None = None
) -> Callable[..., None]:
    """Let a command take groups of options as parameters; the groups come after its own options.

    A group is `Config`, or a dataclass whose fields are annotated with options.

    Args:
        leave_out: fields of the groups that are not options of this command; they keep their defaults.
        defaults: the configuration if no option is given.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return")
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    called = next((name for name, hint in hints.items() if hint is typer.Context), None)
    if called is None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(_CONTEXT, kind, annotation=typer.Context))
    taken: dict[str, list[str]] = {}
    for name, group in groups.items():
        its = _config_parameters(leave_out) if group is Config else _parameters(group, leave_out)
        taken[name] = [parameter.name for parameter in its]
        parameters += its

    def run(**values: Any) -> None:
        context = values[called] if called else values.pop(_CONTEXT)
        filled: dict[str, Any] = {}
        for name, group in groups.items():
            given = {option: values.pop(option) for option in taken[name]}
            if group is Config:
                given = {option: value for option, value in given.items() if value not in (None, [])}
                filled[name] = _strongest(partial(_config, defaults or Config()), given, context)
            else:
                filled[name] = _strongest(group, given, context)
        command(**values, **filled)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _config(defaults: Config, /, **given: Any) -> Config:
    config = defaults.with_(**given)
    config.check()
    return config


def _strongest(make: Callable[..., Any], given: dict[str, Any], context: typer.Context) -> Any:
    """Make a group of options; of two that exclude each other, one on the command line prevails.

    Raises:
        ContradictionError: both are on the command line, or neither is.
    """
    try:
        return make(**given)
    except ContradictionError as error:
        weaker = {n for n in error.options if n in given and not is_on_command_line(context, n)}
        if not weaker or weaker.issuperset(error.options):
            raise
        kept = {name: value for name, value in given.items() if name not in weaker}
        return _strongest(make, kept, context)


def _parameters(group: Any, leave_out: Collection[str]) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in fields(group)
        if field.name not in leave_out
    ]


def _config_parameters(leave_out: Collection[str]) -> list[inspect.Parameter]:
    """The options of `Config`; each is None if it is not given, so that its default is that of `Config`."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[declared.values.typed | None, config_option(name)],
        )
        for name, declared in OPTIONS.items()
        if name not in leave_out and declared.everywhere and (declared.flags or name == "model")
    ]
