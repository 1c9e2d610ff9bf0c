"""`edgespec merge`: joins the answers of a batch whose lines several runs have shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.options.declaration import option
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import OutputError, UsageError


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Output files of the sharded runs.", metavar="PART...")],
    input_name: Annotated[
        str,
        option(None, "-i --input", "The JSONL input of those runs.", variable=False, metavar="FILE"),
    ],
    output: Annotated[
        Path, option(None, "-o --output", "File for the merged results.", variable=False, metavar="FILE")
    ],
    answers: Annotated[
        int,
        option(
            None,
            "--n --answers",
            "Answers per prompt, as for generate.",
            envvar=["EDGESPEC_ANSWERS", "EDGESPEC_N"],
            metavar="N",
        ),
    ] = 1,
    overwrite: Annotated[
        bool, option(None, "--overwrite", "Replace the output file if it exists.", variable=False)
    ] = False,
    as_json: Annotated[bool, option(None, "--json", "Print JSON.")] = False,
    quiet: Annotated[bool, option(None, "--quiet", "Print only results and errors.")] = False,
) -> None:
    """Join the results of generate --shard, in the order of the input.

    Nothing is written unless every line of the input has a result.
    """
    if input_name == "-":
        raise UsageError("The input of a merge must be a file.", "Give the input file of the shards.")
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists.", "Give another name to --output, or --overwrite.")
    for path in [*parts, Path(input_name)]:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is one of the input files.", "Give another name to --output.")
    from edgespec.cli.batch.merge import Merger

    terminal = Terminal(quiet=quiet)
    merged = Merger(parts, input_name, answers).write(output)
    if merged.not_asked:
        terminal.warn(
            f"Left out {count(merged.not_asked, 'result')} for lines that {input_name} does not have."
        )
    if as_json:
        results().record({"output": str(output), "answered": merged.answered, "failed": merged.failed})
    summary = f"{merged.answered} answered" + (f", {merged.failed} failed" if merged.failed else "")
    terminal.note(f"{output}: {summary}, from {count(len(parts), 'part')}.")
    if merged.failed:
        raise typer.Exit(1)
