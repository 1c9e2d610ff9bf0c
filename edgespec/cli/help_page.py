"""The pages of `--help`: options by group, wrapped to any window; Typer's own cut words in narrow ones.

Plain text also keeps Rich, which takes longer to import than all the rest, out of `--help`.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgespec.cli.options.plain_values import convert_plainly
from edgespec.errors import UsageError

_NARROW = 60  # columns; below, what an option does stands under it
_WIDEST = 100
_MARGIN = 30  # most columns for names, with the space around them


def use_for(app: typer.Typer) -> None:
    """Use these pages for an app and the groups in it."""
    app.info.cls = HelpGroup
    for command in app.registered_commands:
        command.cls = HelpCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            use_for(group.typer_instance)


class _PlainParameters:
    """Commands that convert plain values by themselves."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            convert_plainly(parameter)
        return found


class HelpCommand(_PlainParameters, TyperCommand):
    """A command with such a page, whose refusals of values name where these came from."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            from edgespec.cli.options.from_file import say_source

            say_source(error, ctx)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page(self, ctx, _columns()))


_OTHER_NAMES = {"rm": "remove", "remove": "rm", "ls": "list"}


class HelpGroup(_PlainParameters, TyperGroup):
    """A group of commands with such a page, which can be called by names from elsewhere, too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found or super().get_command(ctx, _OTHER_NAMES.get(cmd_name, cmd_name))

    def overview(self) -> Iterable[tuple[str, str, str | None]]:
        """The name, summary and heading of each command."""
        for name, below in self.commands.items():
            heading: Any = getattr(below, "rich_help_panel", None)
            yield name, next(iter(_paragraphs(below.help)), ""), heading or None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(page(self, ctx, _columns()))


def page(command: Any, context: Any, columns: int) -> str:
    """The help of a command or a group for a window of this width."""
    parts = [_wrapped(f"Usage: {_usage(command, context)}", columns, hang=7)]
    parts += [_wrapped(paragraph, columns) for paragraph in _paragraphs(command.help)]
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if not getattr(parameter, "hidden", False):
            panels.setdefault(_panel(parameter), []).append((_names(parameter), help_of(parameter)))
    # What the command is about comes first, and what every command has comes last.
    for title in sorted(panels, key=lambda title: (title != _ARGUMENTS) + (title == _OPTIONS)):
        parts.append(_section(title, panels[title], columns))
    commands: dict[str, list[tuple[str, str]]] = {}
    for name, summary, heading in command.overview() if isinstance(command, HelpGroup) else ():
        commands.setdefault(heading or "Commands", []).append((name, summary))
    parts += [_section(title, rows, columns) for title, rows in commands.items()]
    if command.epilog:
        parts.append(_epilog(command.epilog, columns))
    return "\n\n".join(parts) + "\n"


_ARGUMENTS, _OPTIONS = "Arguments", "Options"


def help_of(parameter: Any) -> str:
    """Describe an option and its default."""
    text = parameter.help or ""
    default = parameter.default
    if default is None or isinstance(default, bool | list) or callable(default) or "Default:" in text:
        return text
    return f"{text} Default: {default:g}." if isinstance(default, float) else f"{text} Default: {default}."


def _usage(command: Any, context: Any) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _panel(parameter: Any) -> str:
    usual = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
    return getattr(parameter, "rich_help_panel", None) or usual


def _names(parameter: Any) -> str:
    """Such as `-c, --context N`: short names first, and the main one before its value."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    flags = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag or not parameter.metavar else f" {parameter.metavar}"
    return ", ".join(sorted(flags, key=lambda flag: flag.startswith("--"))) + value


def _section(title: str, rows: Sequence[tuple[str, str]], columns: int) -> str:
    return "\n".join([_bold(f"{title}:"), *(line for row in _rows(rows, columns) for line in row)])


def _rows(rows: Sequence[tuple[str, str]], columns: int) -> Iterable[list[str]]:
    margin = min(max(len(name) for name, _ in rows) + 4, _MARGIN)
    for name, text in rows:
        if columns < _NARROW:
            yield [f"  {name}", *_lines(text, columns, 6)]
        elif len(name) + 4 > margin:
            yield [f"  {name}", *_lines(text, columns, margin)]
        else:
            first, *more = _lines(text, columns, margin) or [""]
            yield [f"  {name:<{margin - 2}}{first.strip()}".rstrip(), *more]


def _epilog(epilog: str, columns: int) -> str:
    """Examples are kept as they are, to be copied; everything else is wrapped."""
    lines = []
    for paragraph in _paragraphs(epilog):
        if paragraph.startswith("edgespec "):
            lines.append(f"  {paragraph}")
        else:
            lines += ["\n".join(_lines(paragraph, columns, 0))]
    return "\n".join(lines)


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in (text or "").split("\n\n") if part.strip()]


def _wrapped(text: str, columns: int, hang: int = 0) -> str:
    return textwrap.fill(text, columns - 1, subsequent_indent=" " * hang, break_on_hyphens=False)


def _lines(text: str, columns: int, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text,
        columns - 1,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _bold(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else typer.style(text, bold=True)


def _columns() -> int:
    return max(min(shutil.get_terminal_size().columns, _WIDEST), 20)
