"""The program `edgespec`: its commands, and how failures are reported.

Only what `--help` needs is imported here; a command imports the rest when it runs. A failure is printed
as one line that says what happened, and one that says what to do. Exit codes: 0 done, 1 failed, 2 usage,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.base.option import naming_flags
from edgespec.cli import config_file as settings
from edgespec.cli.command_table import RootGroup
from edgespec.cli.standard_error import never_fail
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.processes.children import child_environment
from edgespec.version import __version__

_HELP = {"-h", "--help"}
# Options of llama.cpp by what they are here; "" if nothing is. Short ones would be read letter by letter.
LLAMA_CPPS = {
    "--context": ["--ctx-size"],
    "--max-tokens": ["--n-predict", "--predict"],
    "--threads": ["-tb", "--threads-batch"],
    "--gpu-layers": ["--n-gpu-layers"],
    "--kv": ["-ctk", "-ctv", "--cache-type-k", "--cache-type-v"],
    "--parallel": ["-np"],
    "--draft": ["--model-draft", "--spec-draft-model"],
    "--tree-budget": ["--draft-max", "--draft-min", "--draft-n", "--spec-draft-n-max"],
    "--draft-device": ["-ngld", "--gpu-layers-draft"],
    "--system": ["-sys", "--system-prompt"],
    "--stop": ["-r", "--reverse-prompt"],
    "--offload mmap": ["--mmap"],
    "--memory": ["-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot"],
    "--think": ["--reasoning-budget"],
    "edgespec chat": ["-cnv", "--conversation", "--interactive"],
    "edgespec generate": ["-no-cnv", "--no-conversation"],
    "edgespec serve with an embedding model": ["--embedding", "--embeddings", "--reranking"],
    "": [
        "-fa",
        "--flash-attn",
        "-b",
        "--batch-size",
        "-ub",
        "--ubatch-size",
        "--jinja",
        "--no-warmup",
        "--no-mmap",
        "--mlock",
    ],
}
_DELETE = ("rm", "remove", "--forget", "--yes")  # are never suggested

app = typer.Typer(
    name="edgespec",
    cls=RootGroup,
    help="Run a GGUF model larger than memory at chat speed: a small model drafts, the large one verifies.",
    epilog="Most options have an environment variable: EDGESPEC_MEMORY=8GiB is --memory 8GiB. Options for a "
    "single run, such as --output, have none.",
    context_settings={"help_option_names": sorted(_HELP)},
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgespec {__version__}")  # noqa: TID251
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())  # noqa: TID251


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    if arguments is None:  # as a program
        arguments = sys.argv[1:]
        never_fail()
        os.environ |= {"PATH": child_environment()["PATH"]}  # libraries start programs, too
        if sys.stderr is not None:
            faulthandler.enable(all_threads=False)  # a crash in native code prints where it was
    arguments = with_bare_json(_as_options(arguments))
    _escape_unprintable()
    try:
        _refuse_llama_cpps(arguments)
        with naming_flags():
            code = app(
                args=arguments,
                prog_name="edgespec",
                standalone_mode=False,
                default_map=_defaults_from_file(arguments),
            )
        _flush_results()
    except Exception as error:
        _abandon_results()
        return _report(error, verbose=_verbose(arguments))
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _as_options(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with the commands `help [COMMAND]` and `version` of other programs as options.

    llama.cpp's `-hf REPO` names a model, too; its letters would be options of their own. The options for
    completion are those of the shell that is named after them, or else of the one around.
    """
    arguments = ["--model" if word in ("-hf", "-hfr", "--hf-repo") else word for word in arguments]
    match arguments:
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
        case ["--show-completion" | "--install-completion", shell] if not shell.startswith("-"):
            os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # takes names
    return arguments


def _refuse_llama_cpps(arguments: Sequence[str]) -> None:
    """Say what to use in place of llama.cpp's own options."""
    known = {name: own for own, names in LLAMA_CPPS.items() for name in names}
    for before, word in pairwise(["", *takewhile(lambda word: word != "--", arguments)]):
        name = word.partition("=")[0]
        if (own := known.get(name)) is not None and before not in ("-p", "--prompt"):
            needless = own in ("", f"edgespec {arguments[0]}")
            hint = "Leave it out: EdgeSpec does not need it." if needless else f"Use {own}."
            raise UsageError(f"{name} is an option of llama.cpp.", hint)


def with_bare_json(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--json` of bench as `--json -` where no file follows: Typer needs a value."""
    words = list(arguments)
    if words[:1] == ["bench"]:
        for at in reversed([at for at, word in enumerate(words) if word == "--json"]):
            if words[at + 1 : at + 2] != ["-"] and all(w.startswith("-") for w in words[at + 1 : at + 2]):
                words.insert(at + 1, "-")
    return words


def _is_for_help(arguments: Sequence[str]) -> bool:
    """True if no command will run."""
    return not arguments or arguments[0].startswith("-") or bool(_HELP & {*arguments})


def _defaults_from_file(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Defaults of each command from the configuration file; help is shown even if that file is damaged."""
    if _is_for_help(arguments):
        return {}
    file = settings.config_path()
    if arguments[0] in ("config", "doctor") or not (settings.is_named() or _may_exist(file)):
        return {}
    from edgespec.cli.commands.config import WITHOUT_SETTINGS, defaults_from

    settings.use_models_folder()
    if arguments[0] in WITHOUT_SETTINGS:
        return {}
    command: Any = typer.main.get_command(app)
    return defaults_from(file, command.commands)


def _may_exist(file: Path) -> bool:
    """False if there is no such file; True if it cannot even be looked for, so that reading it says why."""
    try:
        return file.exists()
    except OSError:
        return True


def _report(error: Exception, *, verbose: bool) -> int:
    """Print a failure; returns its exit code."""
    match error:
        case EdgeSpecError():
            what, hint, code = error.what, error.hint, error.exit_code
        case typer.TyperException() if not error.format_message():
            return error.exit_code
        case typer.TyperException() if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)  # noqa: TID251 (the help of a group of commands)
            return error.exit_code
        case typer.TyperException():
            (what, hint), code = _refused_by_typer(error), error.exit_code
        case typer.Abort() | BrokenPipeError():
            return 1  # the reader is gone
        case MemoryError():
            what, code = "Not enough memory.", 1
            hint = "Lower --context or --tree-budget, or use a smaller model."
        case OSError():
            (what, hint), code = _refused_by_system(error), 1
        case _:
            what, code = f"This is a bug in EdgeSpec: {type(error).__name__}: {error}", 1
            hint = "" if verbose else "Run it again with --verbose and report what it prints."
            if verbose:
                import traceback

                traceback.print_exception(error)
    from edgespec.cli.screen.terminal import print_error

    print_error(what, hint)
    return code


def _refused_by_typer(error: Any) -> tuple[str, str]:
    """Typer's message, with the near names it suggests unless one of them deletes something."""
    from edgespec.cli.options.from_file import message_of

    context = getattr(error, "ctx", None)
    if getattr(error, "possibilities", None):
        error.possibilities = [name for name in error.possibilities if name not in _DELETE]
    what = message_of(error)
    refused, suggests, names = what.partition(". Did you mean ")
    if suggests and any(f"'{name}'" in names for name in _DELETE):
        what = f"{refused}."
    return what, "" if context is None else f"See '{context.command_path} --help'."


def _refused_by_system(error: OSError) -> tuple[str, str]:
    """Say what the system refused, and what to do."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "The current folder no longer exists.", "Change to another one."
    fault = error.strerror or str(error)
    if error.filename is None:
        return f"The system refused: {fault}.", ""
    hint = "Check the path and its permissions." if isinstance(error, PermissionError) else ""
    return f"{error.filename} cannot be accessed: {fault}.", hint


def _verbose(arguments: Sequence[str]) -> bool:
    return "--verbose" in arguments or bool(os.environ.get("EDGESPEC_VERBOSE"))


def _escape_unprintable() -> None:
    """Have a terminal that is not UTF-8 show '\\u2026' instead of ending the program.

    Files and pipes get UTF-8, as they must give, unless the user chose otherwise.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            chosen = stream.isatty() or "PYTHONIOENCODING" in os.environ
            reconfigure(encoding=None if chosen else "utf-8", errors="backslashreplace")


def _flush_results() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _abandon_results() -> None:
    """Keep the buffer's rest from failing again when Python exits, after a failed write."""
    try:
        _flush_results()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
