"""The program `edgespec`: its commands, and how failures are reported.

Only what `--help` needs is imported here; a command imports the rest when it runs. A failure is printed
as one line that says what happened, and one that says what to do. Exit codes: 0 done, 1 failed, 2 usage,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from edgespec.cli import config_file as settings
from edgespec.cli import help_page
from edgespec.cli.commands.bench import bench
from edgespec.cli.commands.chat import chat
from edgespec.cli.commands.config import WITHOUT_SETTINGS, config, defaults_from
from edgespec.cli.commands.doctor import doctor
from edgespec.cli.commands.draft import app as draft_app
from edgespec.cli.commands.generate import generate
from edgespec.cli.commands.models import app as models_app
from edgespec.cli.commands.models import list_models, pull, remove, show
from edgespec.cli.commands.plan import plan
from edgespec.cli.commands.presets import app as presets_app
from edgespec.cli.commands.profile import profile
from edgespec.cli.commands.ps import ps
from edgespec.cli.commands.serve import serve
from edgespec.cli.commands.sessions import app as sessions_app
from edgespec.cli.crash import announce_crashes
from edgespec.cli.options.rows import with_bare_json
from edgespec.errors import EdgeSpecError
from edgespec.version import __version__

_IN_PYTHON_ALONE = {"config", "-h", "--help", "--version"}  # these run no native code, which could crash
_HELP = {"-h", "--help"}
_SHORT = "Short forms, as in ollama"

app = typer.Typer(
    name="edgespec",
    help="Run a GGUF model larger than memory at chat speed: a small model drafts, the large one verifies.",
    epilog="Options have environment variables: EDGESPEC_MEMORY=8GiB is --memory 8GiB. Those of a single run "
    "have none, such as --output.",
    context_settings={"help_option_names": sorted(_HELP)},
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
app.command(
    epilog="Examples:\n\nedgespec chat\n\nedgespec chat 'Why is the sky blue?'\n\n"
    "edgespec chat large.gguf --draft small.gguf --memory 12GiB",
)(chat)
app.command(
    "run",
    rich_help_panel=_SHORT,
    help="Hold a conversation, or answer one prompt and end.",
    epilog="Examples:\n\nedgespec run llama3.2-1b\n\nedgespec run llama3.2-1b 'Why is the sky blue?'",
)(chat)
app.command(
    epilog="Examples:\n\nedgespec generate 'Why is the sky blue?'\n\n"
    "edgespec generate large.gguf 'Why is the sky blue?' --memory 12GiB\n\n"
    "edgespec generate -p 'Summarize this.' <notes.txt\n\n"
    "edgespec generate --input prompts.jsonl --output answers.jsonl",
)(generate)
app.add_typer(models_app)
app.add_typer(draft_app)
app.add_typer(sessions_app)
app.add_typer(presets_app)
app.command(
    epilog="Examples:\n\nedgespec serve\n\nedgespec serve large.gguf --memory 12GiB --port 8000",
)(serve)
app.command(
    epilog="Examples:\n\nedgespec profile\n\nedgespec profile large.gguf --draft small.gguf --memory 12GiB",
)(profile)
app.command(
    epilog="Examples:\n\nedgespec plan llama3.3-70b\n\n"
    "edgespec plan large.gguf --draft small.gguf --memory 12GiB",
)(plan)
app.command(
    epilog="Examples:\n\nedgespec bench\n\nedgespec bench big.gguf --memory 12GiB --html bench.html\n\n"
    "edgespec bench --synthesize 8GiB --memory-cap 4GiB",
)(bench)
app.command(epilog="Examples:\n\nedgespec doctor\n\nedgespec doctor large.gguf --json")(doctor)
for _name, _command, _example in (
    ("pull", pull, "llama3.2-1b"),
    ("list", list_models, "--all"),
    ("show", show, "llama3.2-1b"),
    ("rm", remove, "llama3.2-1b"),
):
    app.command(_name, rich_help_panel=_SHORT, epilog=f"Example:\n\nedgespec {_name} {_example}")(_command)
app.command(rich_help_panel=_SHORT, epilog="Example:\n\nedgespec ps")(ps)
app.command(epilog="Examples:\n\nedgespec config\n\nedgespec config --init")(config)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgespec {__version__}")
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
        typer.echo(context.get_help())


help_page.use_for(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    if arguments is None:  # as a program
        arguments = sys.argv[1:]
        if not _IN_PYTHON_ALONE.issuperset(arguments[:1]):
            announce_crashes(verbose=_verbose(arguments))
    arguments = with_bare_json(arguments)
    _escape_unprintable()
    try:
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


def _defaults_from_file(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Defaults of each command from the configuration file; help is shown even if that file is damaged."""
    file = settings.config_path()
    if not (file.exists() or settings.is_named()) or not arguments:
        return {}
    if arguments[0].startswith("-") or _HELP & {*arguments} or arguments[0] in ("config", "doctor"):
        return {}
    settings.use_models_folder()
    if arguments[0] in WITHOUT_SETTINGS:
        return {}
    command: Any = typer.main.get_command(app)
    return defaults_from(file, command.commands)


def _report(error: Exception, *, verbose: bool) -> int:
    """Print a failure; returns its exit code."""
    match error:
        case EdgeSpecError():
            what, hint, code = error.what, error.hint, error.exit_code
        case typer.TyperException() if not error.format_message():
            return error.exit_code
        case typer.TyperException() if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)  # a group of commands without one: its help
            return error.exit_code
        case typer.TyperException():
            from edgespec.cli.suggestions import explained

            (what, hint), code = explained(error), error.exit_code
        case typer.Abort() | BrokenPipeError():
            return 1  # the reader is gone
        case MemoryError():
            what, code = "There is not enough memory.", 1
            hint = "Ask for a smaller --context or --tree-budget, or take a smaller model."
        case OSError():
            what, hint, code = f"The system refused: {error}.", "", 1
        case _:
            what, code = f"This is a bug in EdgeSpec: {type(error).__name__}: {error}", 1
            hint = "" if verbose else "Run it again with --verbose and report what it prints."
            if verbose:
                import traceback

                traceback.print_exception(error)
    from edgespec.cli.screen.terminal import print_error

    print_error(what, hint)
    return code


def _verbose(arguments: Sequence[str]) -> bool:
    return "--verbose" in arguments or bool(os.environ.get("EDGESPEC_VERBOSE"))


def _escape_unprintable() -> None:
    """Have a terminal that is not UTF-8 show '\\u2026' instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _flush_results() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _abandon_results() -> None:
    """After a failed write, keep the rest of the buffer from failing again when Python exits."""
    try:
        _flush_results()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
