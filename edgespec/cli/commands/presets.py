"""`edgespec presets`: models, system prompts and settings under a name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from edgespec.cli import presets
from edgespec.cli.options.declaration import Json, command_group, is_on_command_line, option, with_options
from edgespec.cli.options.from_file import options_of
from edgespec.cli.options.model_flag import ModelFlag
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.prompt.system import SystemFile, system_prompt
from edgespec.cli.screen.formatting import table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.cli.utf8 import as_text
from edgespec.config import Config
from edgespec.errors import OutputError, UsageError
from edgespec.files.user_folders import expanded

app = command_group("presets", "Save a model, a system prompt and settings under a name for --preset.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Its name.", autocompletion=presets.complete_preset)
]

_FILES = ("json-schema", "grammar")  # options whose values may name files
_NOT_SAVED = ("name", "force", "model_flag", "system_file")


@app.command("list", epilog="Example:\n\nedgespec presets list")
def list_presets(as_json: Json = False) -> None:
    """List the presets."""
    found = {name: presets.read(name) for name in presets.names()}
    if as_json:
        results().record({"presets": found})
        return
    if not found:
        Terminal().note("No presets yet. To save one: edgespec presets save NAME --system TEXT")
        return
    rows = [(name, str(values.get("model", "-")), _summary(values)) for name, values in found.items()]
    results().text(table(("NAME", "MODEL", "SETTINGS"), rows))


@app.command(epilog="Example:\n\nedgespec presets show reviewer")
def show(name: Name, as_json: Json = False) -> None:
    """Print a preset's file."""
    values = presets.read(name)
    if as_json:
        results().record(values)
    else:
        results().verbatim(presets.existing(name).read_text(encoding="utf-8"))


def save(
    called: typer.Context,
    name: Name,
    force: Annotated[bool, option(None, "--force", "Replace an existing preset.", variable=False)] = False,
    system: Annotated[str | None, option("Prompt", "--system", "The system prompt.", metavar="TEXT")] = None,
    system_file: SystemFile = None,
    *,
    flag: ModelFlag,
    loading: Config,
    sampling: SamplingOptions,
) -> None:
    """Save the given options of chat, generate and serve under a name."""
    loading = flag.on(loading, called)
    sampling.config_for(loading)  # refuses what could not be used
    file = presets.path_of(name)
    if file.exists() and not force:
        raise UsageError(f"The preset '{name}' already exists.", "Add --force to replace it.")
    system = system_prompt(called, system, system_file)
    values: dict[str, Any] = {}
    if is_on_command_line(called, "model") or is_on_command_line(called, "model_flag"):
        values["model"] = _lasting("model", loading.model.name)
    if is_on_command_line(called, "system") or is_on_command_line(called, "system_file"):
        values["system"] = system
    for key, parameter in options_of(called.command).items():
        if parameter.name not in _NOT_SAVED and is_on_command_line(called, parameter.name):
            values.setdefault(key, _lasting(key, called.params[parameter.name]))
    if not values:
        raise UsageError("Nothing to save.", "Give a model, --system, or settings.")
    Terminal().note(f"Wrote {presets.write(name, values)}. To use it: --preset {name}")


app.command("save", epilog="Example:\n\nedgespec presets save reviewer qwen3-8b --system 'You review code.'")(
    with_options(save)
)


@app.command("rm", epilog="Example:\n\nedgespec presets rm reviewer")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Their names.", autocompletion=presets.complete_preset),
    ],
) -> None:
    """Remove presets."""
    for file in [presets.existing(name) for name in names]:
        try:
            file.unlink()
        except OSError as error:
            raise OutputError(f"{file} cannot be removed: {error.strerror}.", "") from error
        Terminal().note(f"Removed {file}.")


def _lasting(key: str, value: Any) -> Any:
    """A value that means the same in any folder: paths of files are made absolute."""
    if key in (*_FILES, "model", "draft") and isinstance(value, str) and expanded(value).is_file():
        return str(expanded(value).absolute())
    if isinstance(value, tuple | list):
        return [_lasting(key, item) for item in value]
    return as_text(value, f"--{key}") if isinstance(value, str) else value


def _summary(values: dict[str, Any]) -> str:
    shown = {key: " ".join(str(value).split()) for key, value in values.items() if key != "model"}
    text = ", ".join(f"{key} {value}" for key, value in shown.items())
    return text if len(text) <= 60 else text[:59] + "…"
