"""The options that say what is printed besides the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgespec.cli.options.declaration import option
from edgespec.errors import ContradictionError


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
