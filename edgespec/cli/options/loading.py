"""The flag -m MODEL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.options.declaration import is_on_command_line, option
from edgespec.config import Config
from edgespec.errors import UsageError


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
        """The model of the flag, or else of the argument.

        Raises:
            UsageError: the command line has both.
        """
        if self.model_flag is not None and is_on_command_line(called, "model"):
            raise UsageError(f"Two models were named: {model} and {self.model_flag}.", "Name one.")
        return self.model_flag or model

    def on(self, loading: Config, called: typer.Context) -> Config:
        """The options with the model of the flag; raises as `or_argument`."""
        return loading.with_(model=self.or_argument(loading.model.name, called))
