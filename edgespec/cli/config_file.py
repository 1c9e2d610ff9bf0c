"""The user's configuration file: values for options that are not given on the command line.

    # ~/.config/edgespec/config.toml, or the platform's place for it
    memory = "12GiB"
    temperature = 0.7

    [chat]
    system = "Be brief."

Names are those of the options. Values at the top apply to every command that has the option, those in a table
to one command. Flags take precedence over environment variables, and these over the file.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError

TEMPLATE = """\
# EdgeSpec's configuration. Names are those of the options, see 'edgespec chat --help'.
# Flags come first, then environment variables (EDGESPEC_MEMORY), then this file.

# model = "/models/large.gguf"
# draft = "/models/small.gguf"
# memory = "12GiB"
# context = 8192
# temperature = 0.7

# [chat]
# system = "Be brief."
"""


def config_path() -> Path:
    """Where the file is, or would be: EDGESPEC_CONFIG, or the platform's place."""
    named = os.environ.get("EDGESPEC_CONFIG")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_config_path

    return user_config_path("edgespec") / "config.toml"


def is_named() -> bool:
    """Whether EDGESPEC_CONFIG names the file, which then has to exist."""
    return bool(os.environ.get("EDGESPEC_CONFIG"))


def read_config(path: Path) -> dict[str, Any]:
    """The values in the file; empty if there is none.

    Raises:
        UsageError: it cannot be read, is not TOML, or is named by EDGESPEC_CONFIG and does not exist.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_named():
            raise UsageError(
                f"EDGESPEC_CONFIG names {path}, and there is no such file.",
                "Correct it, unset it, or make the file: edgespec config --init",
            ) from error
        return {}
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", "Correct it, or move it away."
        ) from error
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = toml.loads(data.decode())
        return values
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.", "Correct it, or move it away.") from error
