"""The commands of the program, as they are registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from edgespec.cli.main import app


def leaf_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is no group of others, and the words that call it."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if not hasattr(command, "commands"):
            yield words, command
            return
        for name, inner in command.commands.items():
            yield from below(inner, (*words, name))

    return below(typer.main.get_command(app), ())
