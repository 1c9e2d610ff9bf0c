"""`edgespec models`: fetch models, see what they are, pair, widen and remove them."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli.terminal import Terminal, results

app = typer.Typer(
    name="models",
    help="Fetch models, see what they are, pair, widen and remove them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only results and errors.")]
Model = Annotated[str, typer.Argument(help="Path, catalog name or org/repo[:quant].", metavar="MODEL")]


@app.command(epilog="Example:\n\nedgespec models pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")
def pull(
    model: Model,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask for a newer version even if it is here.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a model into the Hub's cache; prints its path."""
    from edgespec.models import catalog
    from edgespec.models import pull as pulling

    terminal = Terminal(quiet=quiet)
    with terminal.working() as progress:
        name = catalog.hub_name_of(model)
        if name is None:
            found = catalog.resolve(model, progress)
        else:
            found = pulling.pull(name, progress, refresh=refresh)
    for note in found.notes:
        terminal.note(note)
    if as_json:
        results().record({"model": model, "path": str(found.path), "notes": list(found.notes)})
    else:
        results().text(f"{found.path}\n")
