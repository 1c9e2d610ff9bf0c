"""The values of `--json` of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import UsageError


def check_no_model(path: Path) -> None:
    """Refuse to write over a model: `--json big.gguf` was meant as --json and a model."""
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{path} is a model and would be overwritten.", f"Name the model with -m: -m {path}")


def with_bare_json(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--json` of bench as `--json -` where no file follows: Typer needs a value."""
    words = list(arguments)
    if words[:1] == ["bench"]:
        for at in reversed([at for at, word in enumerate(words) if word == "--json"]):
            if words[at + 1 : at + 2] != ["-"] and all(w.startswith("-") for w in words[at + 1 : at + 2]):
                words.insert(at + 1, "-")
    return words
