"""The system prompt: given as text, or as the name of a file that holds it."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli.options.declaration import is_on_command_line, option
from edgespec.cli.utf8 import as_text, read_text
from edgespec.errors import UsageError

SystemFile = Annotated[
    str | None,
    option("Prompt", "--system-file", "A file with the system prompt.", metavar="FILE"),
]


def system_prompt(called: typer.Context, text: str | None, file: str | None) -> str | None:
    """The system prompt of --system or --system-file; None if there is none.

    Raises:
        UsageError: both are given, the file cannot be read, or the prompt is not valid UTF-8.
    """
    on_line = [name for name in ("system", "system_file") if is_on_command_line(called, name)]
    if len(on_line) == 2:
        raise UsageError("Both --system and --system-file were given.", "Give one of them.")
    if file is not None and on_line != ["system"] and (text is None or on_line == ["system_file"]):
        return read_text(file).rstrip("\n")
    return None if text is None else as_text(text, "The system prompt")
