"""Options that several commands share: output, the model as a flag, the system prompt, and --preset."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from edgespec.cli import config_file
from edgespec.cli.completion import complete_model
from edgespec.cli.options.declaration import is_on_command_line, option
from edgespec.cli.options.from_file import checked_values
from edgespec.cli.screen.terminal import is_terminal
from edgespec.cli.utf8 import as_text, read_text
from edgespec.config import Config
from edgespec.errors import ContradictionError, UsageError, did_you_mean

Yes = Annotated[bool, option(None, "-y --yes", "Do not ask for confirmation.", variable=False)]


def confirm_removal(question: str) -> None:
    """Ask before something is removed.

    Raises:
        UsageError: there is no terminal to ask at.
        typer.Abort: the answer is no.
    """
    if not is_terminal(sys.stdin):
        raise UsageError(
            "Cannot ask for confirmation: standard input is not a terminal.", "Add --yes to remove it."
        )
    typer.confirm(question, abort=True, err=True)


@dataclass(frozen=True)
class OutputOptions:
    """Options for what is printed besides the answer."""

    as_json: Annotated[bool, option("Output", "--json", "Print JSON objects.")] = False
    quiet: Annotated[bool, option("Output", "--quiet", "Print only results and errors.")] = False
    verbose: Annotated[bool, option("Output", "--verbose", "Print details and statistics.")] = False

    def __post_init__(self) -> None:
        check_output(quiet=self.quiet, verbose=self.verbose)


def check_output(*, quiet: bool, verbose: bool) -> None:
    """Refuse contradictory options; raises ContradictionError."""
    if quiet and verbose:
        raise ContradictionError(
            "--quiet and --verbose exclude each other.", "Leave out one of them.", "quiet", "verbose"
        )


@dataclass(frozen=True)
class ModelFlag:
    """-m MODEL, for commands whose argument is the model: other programs name it so."""

    model_flag: Annotated[
        str | None,
        option(
            "Model",
            "-m --model",
            "Same as the MODEL argument.",
            variable=False,  # EDGESPEC_MODEL is that of the argument
            metavar="MODEL",
            autocompletion=complete_model,
        ),
    ] = None

    def or_argument(self, model: str | None, called: typer.Context) -> str | None:
        """The model of the flag, or else of the argument."""
        if self.model_flag is not None and is_on_command_line(called, "model"):
            raise UsageError(f"Two models were named: {model} and {self.model_flag}.", "Name one.")
        return model if self.model_flag is None else self.model_flag

    def on(self, loading: Config, called: typer.Context) -> Config:
        """The options with the model of the flag."""
        return loading.with_(model=self.or_argument(loading.model.name, called))


def _use(context: typer.Context, name: str | None) -> str | None:
    """Make the values of a preset the defaults of a command."""
    if name is None or context.resilient_parsing:
        return name
    file = config_file.config_path()
    presets = config_file.presets(config_file.read_config(file))
    if name not in presets:
        hint = did_you_mean(name, presets, f"A preset is a table [presets.{name}] in {file}.")
        raise UsageError(f"There is no preset '{name}'.", hint)
    values = checked_values(context.command, presets[name], file, f"presets.{name}.")
    context.default_map = {**(context.default_map or {}), **values}
    return name


def complete_preset(incomplete: str) -> list[str]:
    """Presets for a shell."""
    presets = config_file.presets(config_file.read_config(config_file.config_path()))
    return [name for name in presets if name.startswith(incomplete)]


Preset = Annotated[
    str | None,
    option(
        "Prompt",
        "--preset",
        "Use the model, system prompt and settings of this table in the configuration file.",
        metavar="NAME",
        is_eager=True,  # before the options whose defaults it sets
        callback=_use,
        autocompletion=complete_preset,
    ),
]


System = Annotated[str | None, option("Prompt", "--system", "The system prompt.", metavar="TEXT")]

SystemFile = Annotated[
    str | None,
    option("Prompt", "--system-file", "A file with the system prompt.", metavar="FILE"),
]


def system_prompt(called: typer.Context, text: str | None, file: str | None) -> str | None:
    """The system prompt of --system or --system-file; None if there is none."""
    on_line = [name for name in ("system", "system_file") if is_on_command_line(called, name)]
    if len(on_line) == 2:
        raise UsageError("Both --system and --system-file were given.", "Give one of them.")
    if file is not None and on_line != ["system"] and (text is None or on_line == ["system_file"]):
        return read_text(file).rstrip("\n")
    return None if text is None else as_text(text, "The system prompt")
